"""A zoo of small models, each with a way of using its weights that pagers stumble over."""

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

WIDTH = 32


class Split(NamedTuple):
    mean: Any
    extra: Any


def mlp():
    return nn.Sequential(
        *[layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    )


def linears(n_layers, width=WIDTH, *, seed=0, bias=True):
    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Linear(width, width, bias) for _ in range(n_layers)]).eval()


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x):
        return torch.relu(x + self.path(x))


def by_the_weight(weight, stream):
    weight.record_stream(stream)


class OnSideStream(nn.Module):
    """Uses its weight on a side stream that the caller waits for only after the model."""

    def __init__(self, module, side, record, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width)
        self.module, self.side, self.record = [module], [side], record

    def forward(self, x):
        weight, (module,), (side,) = self.weight, self.module, self.side
        current = module.current_stream()
        side.wait_stream(current)
        with module.stream(side):
            y = x @ weight
        self.record(weight, side)
        for each, stream in ((x, side), (y, current)):
            each.record_stream(stream)
        return y


class SumOnSideStream(nn.Module):
    """Layers on a side stream, each of which says by `record` that the stream reads its weight."""

    def __init__(self, module, side, record=by_the_weight, *, width=WIDTH, n_layers=6):
        super().__init__()
        self.layers = nn.ModuleList(
            [OnSideStream(module, side, record, width) for _ in range(n_layers)]
        )

    def forward(self, x):
        outputs = [layer(x) for layer in self.layers]
        (layer, *_), (module,) = self.layers, self.layers[0].module
        module.current_stream().wait_stream(layer.side[0])
        return sum(outputs)


def resnet():
    blocks = [Residual(8) for _ in range(4)]
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), *blocks, nn.Flatten(), nn.Linear(8 * 36, 10)
    )


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerDecoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True)
        self.layers = nn.TransformerDecoder(layer, 4)

    def forward(self, x, *, memory):
        return self.layers(x, memory)


class TiedLanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(6)])
        self.position = nn.Parameter(torch.randn(12, WIDTH))
        self.head = nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


class Functional(nn.Module):
    """Reads the weights of children that it never calls."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(5)])
        self.scales = nn.ParameterList([nn.Parameter(torch.rand(WIDTH)) for _ in range(5)])
        self.shifts = nn.ParameterDict({"last": nn.Parameter(torch.rand(WIDTH))})
        self.register_buffer("mask", torch.ones(WIDTH), persistent=False)

    def forward(self, x):
        for layer, scale in zip(self.layers, self.scales, strict=True):
            x = F.linear(x, layer.weight, layer.bias) * scale
        return x * self.mask + self.shifts["last"]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH, num_layers=3, batch_first=True)
        self.out = nn.Linear(WIDTH, 4)

    def forward(self, x):
        hidden, _ = self.rnn(x)
        return self.out(hidden)


class Shared(nn.Module):
    """One block, called many times, under two names."""

    def __init__(self):
        super().__init__()
        self.block = nn.Linear(WIDTH, WIDTH)
        self.again = self.block
        self.between = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, x):
        for layer in self.between:
            x = self.again(torch.relu(layer(self.block(x))))
        return x


class Nested(nn.Module):
    """Takes keyword arguments and nested inputs, and returns a nested output."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in "abc"})

    def forward(self, batch, *, scale=1.0):
        x, (y,) = batch["x"], batch["rest"]
        a = self.layers["a"](x) * scale
        return {"out": Split(self.layers["b"](a), [self.layers["c"](y)])}


def half():
    return mlp().to(torch.bfloat16)


def strided():
    """Weights with strides of their own, and one that is a part of a larger storage."""
    model = mlp()
    for layer in model[::4]:
        layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    model[2].weight = nn.Parameter(torch.randn(3, WIDTH, WIDTH)[1])
    return model


def _x(*shape):
    return lambda: ((torch.randn(*shape),), {})


ZOO = {
    "mlp": (mlp, _x(4, WIDTH)),
    "resnet": (resnet, _x(2, 3, 6, 6)),
    "decoder": (
        Decoder,
        lambda: ((torch.randn(2, 5, WIDTH),), {"memory": torch.randn(2, 3, WIDTH)}),
    ),
    "tied": (TiedLanguageModel, lambda: ((torch.randint(50, (2, 9)),), {})),
    "functional": (Functional, _x(4, WIDTH)),
    "lstm": (Recurrent, _x(2, 5, WIDTH)),
    "shared": (Shared, _x(4, WIDTH)),
    "nested": (
        Nested,
        lambda: (({"x": torch.randn(2, WIDTH), "rest": (torch.randn(2, WIDTH),)},), {"scale": 2.0}),
    ),
    "half": (half, lambda: ((torch.randn(4, WIDTH, dtype=torch.bfloat16),), {})),
    "strided": (strided, _x(4, WIDTH)),
}


def build(name):
    """A model of the zoo in evaluation mode, and its arguments; the same ones each time."""
    make, draw = ZOO[name]
    torch.manual_seed(0)
    return make().eval(), *draw()
