"""Convolutions made smaller: fewer samples and pixels, with the same kernel, strides and channels.

oneDNN chooses by channels, kernel and strides in which layout it computes, and copies what is in
another one; samples and pixels only tell how large those copies are. Which library computes is
chosen by the batch as well: the small problem keeps to the one that the large problem has.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch

from tenure._torch.fakes import select_conv_backend
from tenure._torch.quiet import aside

from ._extrapolation import Axis, Corner
from ._problem import Call
from ._stand_ins import Layout

_aten = torch.ops.aten

_FORWARD = _aten.convolution.default
_BACKWARD = _aten.convolution_backward.default
# One run takes milliseconds: multiplications, and what its weights may take.
_MOST_MULTIPLICATIONS = 40_000_000
_MOST_WEIGHTS = 1 << 20
_PIXEL_GRAIN = 16
_CHANNEL_GRAIN = 64
# From this many samples on oneDNN also takes what it leaves to others before.
_FULL_BATCH = 16
_FEW_CHANNELS = 3
# channels come in blocks of these
_BLOCK = 16
THREAD_BYTES = 24 << 10
"""What a thread has of its own besides a gradient, at most: seen are 9 KB."""


class _Shape(NamedTuple):
    """The sizes that may be made smaller; pixels of the output, or of the input if transposed."""

    n: int
    in_channels: int
    out_channels: int
    pixels: tuple[int, ...]


def is_one(func: Any) -> bool:
    """Whether this module knows how to make a problem of this operation smaller."""
    return func is _FORWARD or func is _BACKWARD


def axes_of(func: Any, call: Call, backend: object) -> list[Axis]:
    """Batch, channels in and out, each spatial size; of those that stay as they are, step is 0.

    Args:
        func: the operation.
        call: its arguments.
        backend: which library computes the whole.
    """
    whole = _shape_of(func, call)
    conv = _parts(func, call)
    few = min(whole.n, max(2, torch.get_num_threads()))
    # the last is more than there are, where threads let another library compute so few
    for n in (few, min(whole.n, _FULL_BATCH), _FULL_BATCH):
        small = _shrunk(whole._replace(n=n), conv)
        if backend_of(func, call, small) == backend:
            break
    else:
        small = _shrunk(whole._replace(n=min(whole.n, _FULL_BATCH)), conv)
    flat = zip(_flat(whole), _flat(small), _steps(whole), strict=True)
    return [Axis(target, base, step if base != target else 0) for target, base, step in flat]


def is_shared(func: Any) -> bool:
    """Whether threads that share it may each have a result of their own."""
    return func is _BACKWARD


def takes_few_channels(func: Any, call: Call) -> bool:
    """Whether it is the first of a network: of images, each thread has a buffer for one."""
    conv = _parts(func, call)
    return conv.input.shape[1] // conv.groups <= _FEW_CHANNELS


def shared_bytes(func: Any, call: Call) -> int:
    """A bound of what more threads than one take for a gradient of the weights.

    oneDNN gives each of them a gradient of its own only where that is less to read and write than
    what they would otherwise read twice: seen is up to a fifth of input and output.
    """
    conv = _parts(func, call)
    grad = conv.input if conv.grad is None else conv.grad
    others = torch.get_num_threads() - 1
    size = max(4, conv.weight.dtype.itemsize)
    weights = _padded(conv.weight.shape[0]) * _padded(conv.weight.shape[1])
    copies = others * weights * prod(conv.weight.shape[2:]) * size
    reads = (conv.input.n_bytes + grad.n_bytes) * size // conv.weight.dtype.itemsize
    # with channels last it is another kernel
    if conv.input.stride[1] != 1:
        copies = min(copies, reads // 4)
    return copies + (others + 1) * THREAD_BYTES if others else 0


def smaller(func: Any, call: Call, axes: list[Axis], corner: Corner) -> Call:
    """The call at the bases of all axes, or one step along those of a corner."""
    sizes = [axis.base + (axis.step if i in corner else 0) for i, axis in enumerate(axes)]
    return _resized(func, call, _Shape(sizes[0], sizes[1], sizes[2], tuple(sizes[3:])))


class _Parts(NamedTuple):
    grad: Layout | None
    input: Layout
    weight: Layout
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int


def _parts(func: Any, call: Call) -> _Parts:
    args = call[0]
    if func is _BACKWARD:
        grad, x, w, _, *rest = args
        return _Parts(grad, x, w, *_lists(x, rest[:6]))
    x, w, _, *rest = args
    return _Parts(None, x, w, *_lists(x, rest[:6]))


def _lists(x: Layout, rest: list[Any]) -> list[Any]:
    n = len(x.shape) - 2
    return [list(each) * n if isinstance(each, list) and len(each) == 1 else each for each in rest]


def _shape_of(func: Any, call: Call) -> _Shape:
    conv = _parts(func, call)
    pixels = conv.input.shape[2:]
    if not conv.transposed:
        pixels = tuple(_out_pixels(conv, d, n) for d, n in enumerate(pixels))
    k = conv.weight.shape[1] * conv.groups if conv.transposed else conv.weight.shape[0]
    return _Shape(conv.input.shape[0], conv.input.shape[1], k, pixels)


def _reach(conv: _Parts, d: int) -> int:
    return conv.dilation[d] * (conv.weight.shape[2 + d] - 1) + 1 - 2 * conv.padding[d]


def _out_pixels(conv: _Parts, d: int, n: int) -> int:
    return (n - _reach(conv, d)) // conv.stride[d] + 1


def _flat(shape: _Shape) -> list[int]:
    return [shape.n, shape.in_channels, shape.out_channels, *shape.pixels]


def _steps(shape: _Shape) -> list[int]:
    return [1, _CHANNEL_GRAIN, _CHANNEL_GRAIN, *[_PIXEL_GRAIN] * len(shape.pixels)]


def _shrunk(shape: _Shape, conv: _Parts) -> _Shape:
    kernel = prod(conv.weight.shape[2:])
    while conv.groups == 1 and shape.in_channels * shape.out_channels * kernel > _MOST_WEIGHTS:
        c, k = shape.in_channels, shape.out_channels
        smaller = _halved(max(c, k), _CHANNEL_GRAIN)
        if smaller == max(c, k):
            break
        c, k = (smaller, k) if c > k else (c, smaller)
        shape = shape._replace(in_channels=c, out_channels=k)
    while _multiplications(shape, conv) > _MOST_MULTIPLICATIONS:
        largest = max(range(len(shape.pixels)), key=lambda d: shape.pixels[d])
        n = _halved(shape.pixels[largest], _PIXEL_GRAIN)
        if n == shape.pixels[largest]:
            break
        pixels = (*shape.pixels[:largest], n, *shape.pixels[largest + 1 :])
        shape = shape._replace(pixels=pixels)
    return shape


def _multiplications(shape: _Shape, conv: _Parts) -> int:
    weights = shape.in_channels * shape.out_channels // conv.groups * prod(conv.weight.shape[2:])
    return shape.n * weights * prod(shape.pixels)


def _halved(n: int, grain: int) -> int:
    blocks = n // grain
    return grain * (blocks // 2) + n % grain if blocks > 1 else n


def _resized(func: Any, call: Call, shape: _Shape) -> Call:
    conv = _parts(func, call)
    whole = _shape_of(func, call)
    ends: list[tuple[int, int]] = []
    for d, n in enumerate(shape.pixels):
        reach, stride = _reach(conv, d), conv.stride[d]
        if conv.transposed:
            ends.append((n, (n - 1) * stride + reach + conv.output_padding[d]))
        else:
            # the pixels at the end that no kernel reaches stay as many
            rest = conv.input.shape[2 + d] - ((whole.pixels[d] - 1) * stride + reach)
            ends.append(((n - 1) * stride + reach + rest, n))
    c, k = shape.in_channels, shape.out_channels
    spatial_in, spatial_out = zip(*ends, strict=True)
    x = conv.input.resized((shape.n, c, *spatial_in))
    first, second = (c, k) if conv.transposed else (k, c)
    w = conv.weight.resized((first, second // conv.groups, *conv.weight.shape[2:]))
    args, kwargs = call
    if conv.grad is not None:
        grad = conv.grad.resized((shape.n, k, *spatial_out))
        sizes = args[3] if args[3] is None else [k]
        return (grad, x, w, sizes, *args[4:]), kwargs
    bias = args[2] if args[2] is None else args[2].resized((k,))
    return (x, w, bias, *args[3:]), kwargs


def _padded(n: int) -> int:
    return -(-n // _BLOCK) * _BLOCK


def backend_of(func: Any, call: Call, shape: _Shape | None = None) -> object:
    """Which library computes a call here, or one of that size."""
    conv = _parts(func, call if shape is None else _resized(func, call, shape))
    with aside():
        # one element that looks like many: nothing is computed
        x, w = (torch.empty(1, dtype=t.dtype, device="cpu").expand(t.shape) for t in conv[1:3])
        return select_conv_backend(x, w, None, *conv[3:])
