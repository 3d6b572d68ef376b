"""Operations as networks, losses and optimizers call them, and what their kernels really take.

Call by call, beside what is said of them. By private names, because a prediction tells its peak,
and not what each call was said to take.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from tenure._torch.allocations import begin, end
from tenure.adaptive._predict._scratch import Inside, inside
from tenure.adaptive._predict._values import STAND_INS


def _x(*shape, dtype=torch.float32, like=None):
    made = torch.randn(*shape).to(dtype)
    if like == "channels_last":
        made = made.to(memory_format=torch.channels_last)
    return made.requires_grad_()


def _ids(n, *shape):
    return torch.randint(0, n, shape)


def layers(dtype=torch.float32):
    """By name, a call of a layer, a loss or a convolution, to go backward from."""
    x = lambda *shape, **options: _x(*shape, dtype=dtype, **options)  # noqa: E731
    image, last = (16, 48, 40, 40), {"like": "channels_last"}
    running = torch.zeros(48, dtype=dtype), torch.ones(48, dtype=dtype)
    picture = (16, 3, 120, 120)

    def target():
        return torch.rand(*picture).to(dtype)

    return {
        "batch_norm": lambda: F.batch_norm(x(*image), *running, x(48), x(48), True),
        "batch_norm_channels_last": lambda: F.batch_norm(
            x(*image, **last), None, None, x(48), x(48), True
        ),
        "group_norm": lambda: F.group_norm(x(*image), 8, x(48), x(48)),
        "layer_norm": lambda: F.layer_norm(x(16, 200, 320), (320,), x(320), x(320)),
        "max_pool": lambda: F.max_pool2d(x(*image), 2),
        "upsample_bilinear": lambda: F.interpolate(x(*image), scale_factor=2, mode="bilinear"),
        "pad_reflect": lambda: F.pad(x(*image), (3, 3, 3, 3), mode="reflect"),
        "grid_sample": lambda: F.grid_sample(
            x(*image), torch.zeros(16, 30, 30, 2, dtype=dtype), align_corners=False
        ),
        "linear": lambda: F.linear(x(16, 200, 320), x(640, 320), x(640)),
        "softmax": lambda: F.softmax(x(16, 8, 200, 200), -1),
        "attention": lambda: F.scaled_dot_product_attention(*(x(4, 8, 300, 64) for _ in range(3))),
        "attention_of_heads": lambda: F.scaled_dot_product_attention(
            *(x(4, 300, 8, 64).transpose(1, 2) for _ in range(3)), dropout_p=0.1
        ),
        "embedding": lambda: F.embedding(_ids(3000, 16, 200), x(3000, 100)),
        "embedding_bag": lambda: F.embedding_bag(_ids(3000, 300, 20), x(3000, 100), mode="mean"),
        "dropout": lambda: F.dropout(x(*image), 0.1),
        "logsigmoid": lambda: F.logsigmoid(x(*image)),
        "cumsum": lambda: x(200, 3000).cumsum(-1),
        "sort": lambda: x(200, 3000).sort(-1).values,
        "scatter_add": lambda: torch.zeros(300, 400, dtype=dtype).scatter_add(
            1, _ids(400, 300, 300), x(300, 300)
        ),
        "index": lambda: x(3000, 100)[_ids(3000, 2000)],
        "index_put": lambda: torch.zeros(3000, 100, dtype=dtype).index_put(
            (_ids(3000, 2000),), x(2000, 100), accumulate=True
        ),
        "mask_product": lambda: x(200, 3000) * torch.ones(200, 3000, dtype=torch.bool),
        "cdist": lambda: torch.cdist(x(8, 200, 40), x(8, 300, 40)),
        "mse": lambda: F.mse_loss(x(*picture), target()),
        "bce_logits": lambda: F.binary_cross_entropy_with_logits(x(*picture), target()),
        "cross_entropy": lambda: F.cross_entropy(x(2000, 1000), _ids(1000, 2000)),
        "cross_entropy_weighted": lambda: F.cross_entropy(
            x(2000, 1000), _ids(1000, 2000), weight=torch.ones(1000, dtype=dtype)
        ),
        "kl": lambda: F.kl_div(
            x(500, 3000), torch.rand(500, 3000).to(dtype), reduction="batchmean"
        ),
        "stem": lambda: F.conv2d(x(8, 3, 128, 128), x(64, 3, 7, 7), None, 2, 3),
        "3x3": lambda: F.conv2d(x(8, 64, 56, 56), x(64, 64, 3, 3), x(64), 1, 1),
        "3x3_channels_last": lambda: F.conv2d(
            x(8, 64, 56, 56, **last), x(64, 64, 3, 3), x(64), 1, 1
        ),
        "1x1": lambda: F.conv2d(x(20, 64, 28, 28), x(256, 64, 1, 1)),
        "depthwise": lambda: F.conv2d(x(8, 96, 56, 56), x(96, 1, 3, 3), None, 1, 1, 1, 96),
        "transposed": lambda: F.conv_transpose2d(x(8, 64, 28, 28), x(64, 32, 2, 2), x(32), 2),
        "3d": lambda: F.conv3d(x(4, 16, 12, 24, 24), x(16, 16, 3, 3, 3), None, 1, 1),
    }


def sequences():
    """By name, a call of what goes along a sequence, or solves equations."""

    def lstm(inputs, hidden, steps=32, samples=16, **options):
        layer = nn.LSTM(inputs, hidden, **options)
        return lambda: layer(_x(steps, samples, inputs))[0]

    def ctc():
        lengths = torch.randint(5, 30, (16,))
        targets = torch.randint(1, 80, (16, 30))
        inputs = F.log_softmax(torch.randn(200, 16, 80).requires_grad_(), -1)
        return F.ctc_loss(inputs, targets, torch.full((16,), 200), lengths)

    return {
        "lstm": lstm(256, 256),
        "lstm_layers": lstm(128, 256, num_layers=2, bidirectional=True),
        "ctc": ctc,
        "spectrum": lambda: torch.fft.irfft(torch.fft.rfft(_x(300, 1000))),
        "cholesky": lambda: torch.linalg.cholesky(
            _x(4, 100, 100) @ _x(4, 100, 100).mT * 0 + torch.eye(100)
        ),
        "solve": lambda: torch.linalg.solve(torch.eye(200) + 0 * _x(200, 200), _x(200, 50)),
    }


def _with_gradients(*shapes):
    made = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    for each in made:
        each.grad = torch.randn_like(each)
    return made


def optimizers():
    """By name, the first step of an optimizer on parameters that it has gradients of."""

    def first_step(cls, *shapes, **options):
        return lambda: cls(_with_gradients(*shapes), **options).step()

    matrix, vector = (300, 400), (500,)
    names = ("SGD", "Adam", "RMSprop", "NAdam", "Adafactor")
    return {
        **{name: first_step(getattr(torch.optim, name), matrix, vector) for name in names},
        "Muon": first_step(torch.optim.Muon, matrix),
        "Adam_fused": first_step(torch.optim.Adam, matrix, vector, fused=True),
        "AdamW_foreach": first_step(torch.optim.AdamW, matrix, vector, foreach=True),
        "clip": lambda: nn.utils.clip_grad_norm_(_with_gradients(matrix, matrix, matrix), 1.0),
    }


# --- what really is taken


@dataclass(frozen=True)
class Call:
    """One operation that ran."""

    func: object
    shapes: str
    truth_bytes: int
    out_bytes: int
    made_bytes: int
    said: Inside

    @property
    def is_low(self):
        return self.said.n_bytes < self.truth_bytes and self.said.reason is None

    @property
    def keeps_more(self):
        """Its results have more memory than those without data."""
        return self.made_bytes > self.out_bytes

    @property
    def is_loose(self):
        """More than 2 % of what is live inside, and more than a few numbers, too high."""
        excess = self.said.n_bytes - self.truth_bytes
        # oneDNN's buffers for 16 bits grow in steps
        part = 0.12 if "bfloat16" in self.shapes else 0.02
        return excess > max(64, part * (self.truth_bytes + self.out_bytes))


class Listening(TorchDispatchMode):
    """Runs each operation on real tensors, and asks about it with fake ones."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        asked = _fake_call(func, args, kwargs)
        begin()
        try:
            result = func(*args, **kwargs)
        finally:
            changes = end()
        if asked is not None:
            fake_args, fake_kwargs, fake_result = asked
            said = inside(func, fake_args, fake_kwargs, fake_result)
            out_bytes = _made_bytes((fake_args, fake_kwargs), said.result)
            live = peak = 0
            for n_bytes in changes.cpu:
                live += n_bytes
                peak = max(peak, live)
            shapes = str([_short(each) for each in tree_leaves((args, kwargs))])
            made_bytes = _made_bytes((args, kwargs), result)
            truth_bytes = max(0, peak - out_bytes)
            self.calls.append(Call(func, shapes, truth_bytes, out_bytes, made_bytes, said))
        return result


def _fake_call(func, args, kwargs):
    try:
        with _disable_current_modes():
            mode = FakeTensorMode()
            args, kwargs = tree_map(partial(_fake, mode), (args, kwargs))
            with mode:
                return args, kwargs, STAND_INS.get(func, func)(*args, **kwargs)
    # what has no fake result is no business of a prediction: it says so by itself
    except Exception:
        return None


def _fake(mode, leaf):
    return mode.from_tensor(leaf.detach()) if isinstance(leaf, torch.Tensor) else leaf


def _made_bytes(before, result):
    known = {each.untyped_storage()._cdata for each in _strided(before)}
    made = {
        each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in _strided(result)
    }
    return sum(n_bytes for key, n_bytes in made.items() if key not in known)


def _strided(tree):
    leaves = tree_leaves(tree)
    return [t for t in leaves if isinstance(t, torch.Tensor) and t.layout is torch.strided]


def _short(leaf):
    if isinstance(leaf, torch.Tensor):
        strides = "" if leaf.is_contiguous() else f" by {tuple(leaf.stride())}"
        return f"{str(leaf.dtype)[6:]}{list(leaf.shape)}{strides}"
    return leaf


def listen(run):
    """The operations of ``run()`` and of the backward pass of what it returns if that needs one."""
    with Listening() as mode:
        result = run()
        if isinstance(result, torch.Tensor) and result.requires_grad:
            result.backward(torch.ones_like(result))
    return mode.calls
