"""One small GPT, and the ways to train it; then steps that are more than forward and backward."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks._training_steps import (
    Step,
    images,
    mean_square,
    next_token,
    step_on,
)


class _Attention(nn.Module):
    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, tokens, width = x.shape
        split = self.qkv(x).view(n, tokens, 3, self.n_heads, width // self.n_heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        found: Tensor = self.out((weights @ v).transpose(1, 2).reshape(n, tokens, width))
        return found


class _Gpt(nn.Module):
    """Attention by hand; ``tied`` shares the embedding, ``checkpointed`` recomputes blocks."""

    def __init__(self, tied: bool = False, checkpointed: str = "") -> None:
        super().__init__()
        width = 192
        self.checkpointed = checkpointed
        self.embed, self.place = nn.Embedding(1000, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                _Attention(width, 4),
                nn.Dropout(0.1),
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Linear(4 * width, width),
            )
            for _ in range(4)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            if self.checkpointed:
                reentrant = self.checkpointed == "reentrant"
                x = x + checkpoint(block, x, use_reentrant=reentrant)
            else:
                x = x + block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def gpt(batch_size: int, **options: Any) -> Step:
    """A small GPT, each operation of its attention written out."""
    return next_token(_Gpt(**options), batch_size, 1000, 64)


def frozen_gpt(batch_size: int) -> Step:
    """Only the last block and the head are trained."""
    step = gpt(batch_size)
    step.model.requires_grad_(False)
    step.model.get_submodule("blocks.3").requires_grad_(True)
    step.model.get_submodule("head").requires_grad_(True)
    return step


def autocast_gpt(batch_size: int) -> Step:
    """The forward in bfloat16, the weights in float32."""
    step = gpt(batch_size)

    def fn(*args: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return step.fn(*args)

    return Step(step.model, fn, step.args)


def bfloat16_gpt(batch_size: int) -> Step:
    """Everything in bfloat16."""
    step = gpt(batch_size)
    step.model.to(torch.bfloat16)
    return step


def accumulated_gpt(batch_size: int) -> Step:
    """Four micro-batches, each run backward inside the function."""
    step = gpt(batch_size)

    def fn(*args: Tensor) -> Tensor:
        total = torch.zeros(())
        for chunk in zip(*(each.chunk(4) for each in args), strict=True):
            loss = step.fn(*chunk) / 4
            loss.backward()
            total += loss.detach()
        return total

    return Step(step.model, fn, step.args)


def transformer(batch_size: int, checkpointed: bool = False) -> Step:
    """Torch's own encoder layers."""
    layer = nn.TransformerEncoderLayer(192, 4, 768, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    x = torch.randn(batch_size, 64, 192)
    if not checkpointed:
        return step_on(encoder, mean_square, x)

    def fn(x: Tensor) -> Tensor:
        for each in encoder.layers:
            x = checkpoint(each, x, use_reentrant=False)
        return mean_square(x)

    return Step(encoder, fn, (x,))


def translator(batch_size: int) -> Step:
    """Torch's own encoder and decoder."""
    model = nn.Transformer(128, 4, 2, 2, 512, batch_first=True)
    source, target = torch.randn(batch_size, 48, 128), torch.randn(batch_size, 32, 128)
    return step_on(model, mean_square, source, target)


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Tensor:
        (x,) = ctx.saved_tensors
        slope: Tensor = 3 * x**2 * grad_outputs[0]
        return slope


class _Cubes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        cube: Any = _Cube.apply
        for layer in self.layers:
            x = cube(layer(x) * 0.1)
        return x


def custom_function(batch_size: int) -> Step:
    """An activation that is an ``autograd.Function``."""
    return step_on(_Cubes(), mean_square, torch.randn(batch_size, 256))


def physics_informed(batch_size: int) -> Step:
    """The residual of the heat equation: gradients of gradients."""
    layers: list[nn.Module] = [nn.Linear(2, 64), nn.Tanh()]
    for _ in range(3):
        layers += [nn.Linear(64, 64), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(64, 1))

    def fn(points: Tensor) -> Tensor:
        points = points.detach().requires_grad_()
        value = model(points)
        (first,) = torch.autograd.grad(value.sum(), points, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), points, create_graph=True)
        return mean_square(first[:, 1] - second[:, 0])

    return Step(model, fn, (torch.rand(64 * batch_size, 2),))


def gradient_penalty(batch_size: int) -> Step:
    """A critic whose gradient is held to a norm: double backward through convolutions."""
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, 2, 1), nn.Softplus(), nn.Conv2d(32, 64, 3, 2, 1), nn.Softplus(),
        nn.Flatten(), nn.Linear(64 * 256, 1),
    )  # fmt: skip

    def fn(images: Tensor) -> Tensor:
        images = images.detach().requires_grad_()
        score = model(images)
        (gradient,) = torch.autograd.grad(score.sum(), images, create_graph=True)
        penalty = (gradient.flatten(1).norm(dim=1) - 1).square().mean()
        total: Tensor = penalty + score.mean()
        return total

    return Step(model, fn, (images(batch_size),))


class _Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(128, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        choice = self.gate(x).softmax(-1)
        weight, chosen = choice.max(-1)
        found = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero().squeeze(1)
            found = found.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return found


def mixture(batch_size: int) -> Step:
    """Experts that take the rows a gate sends them: how many depends on the data."""
    return step_on(_Mixture(), mean_square, torch.randn(32 * batch_size, 128))


class _Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            messages = layer(x)[source]
            x = x.new_zeros(x.shape).scatter_add(0, target[:, None].expand_as(messages), messages)
            x = x.relu()
        return x


def graph(batch_size: int) -> Step:
    """Messages along the edges of a graph, gathered and scattered."""
    edges = torch.randint(64 * batch_size, (2, 512 * batch_size))
    return step_on(_Graph(), mean_square, torch.randn(64 * batch_size, 64), *edges)


def matrix_factors(batch_size: int) -> Step:
    """A loss through a Cholesky factor and a triangular solve, as in a Gaussian process."""
    model = nn.Linear(8, 8)

    def fn(x: Tensor, y: Tensor) -> Tensor:
        z = model(x)
        kernel = (-torch.cdist(z, z).square()).exp() + 0.1 * torch.eye(len(x))
        factor = torch.linalg.cholesky(kernel)
        fit: Tensor = torch.cholesky_solve(y, factor).mul(y).sum()
        found: Tensor = fit + factor.diagonal().log().sum()
        return found

    return Step(model, fn, (torch.randn(16 * batch_size, 8), torch.randn(16 * batch_size, 1)))


def spectral(batch_size: int) -> Step:
    """A Fourier layer: complex weights between two transforms."""
    model = nn.ParameterDict({"w": nn.Parameter(torch.randn(16, 33, dtype=torch.cfloat))})

    def fn(x: Tensor) -> Tensor:
        return mean_square(torch.fft.irfft(torch.fft.rfft(x) * model["w"], n=64))

    return Step(model, fn, (torch.randn(16 * batch_size, 16, 64),))


def contrastive(batch_size: int) -> Step:
    """Two towers and the similarities of all pairs."""
    model = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(2))

    def fn(a: Tensor, b: Tensor) -> Tensor:
        left, right = F.normalize(model[0](a)), F.normalize(model[1](b))
        return F.cross_entropy(left @ right.T * 10, torch.arange(len(a)))

    return Step(model, fn, (torch.randn(8 * batch_size, 256), torch.randn(8 * batch_size, 256)))


def ctc(batch_size: int) -> Step:
    """A recurrent network trained by connectionist temporal classification."""
    model = nn.ModuleList([nn.GRU(40, 128, bidirectional=True), nn.Linear(256, 32)])

    def fn(x: Tensor, labels: Tensor) -> Tensor:
        log_probabilities = model[1](model[0](x)[0]).log_softmax(-1)
        n_frames, n_labels = [x.shape[0]] * x.shape[1], [labels.shape[1]] * x.shape[1]
        lengths: Any = n_frames, n_labels
        loss: Tensor = F.ctc_loss(log_probabilities, labels, *lengths)
        return loss

    return Step(
        model, fn, (torch.randn(100, batch_size, 40), torch.randint(1, 32, (batch_size, 9)))
    )
