"""Run a kernel once for each signature: as it is while it is small, else on smaller problems.

Each block that it allocates is taken to grow along each size as a straight line, with all products
of sizes: exact for tensors, padded copies and buffers, of which all corners of the smallest box are
measured. A block that grows faster than a size, as the scores of attention do with the length,
grows with a power of it.

Sizes are told apart by their values: where 4096 is made smaller in one argument, it is in all of
them, in shapes and among plain integers. A size whose change torch's own checks of shapes refuse
stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import combinations
from math import prod
from typing import Any, NamedTuple

import torch

from tenure._torch.quiet import aside

from ._layouts import Layout, Tree, layout_of, layouts, mapped, total_bytes
from ._run import KernelRun, peak_of, run

_aten = torch.ops.aten
_FORWARD, _BACKWARD = _aten.convolution.default, _aten.convolution_backward.default
_LSTM, _LSTM_BACKWARD = _aten.mkldnn_rnn_layer.default, _aten.mkldnn_rnn_layer_backward.default
_LSTMS = (_LSTM, _LSTM_BACKWARD)
_CONVOLUTIONS = (_FORWARD, _BACKWARD)

# Up to the first all tensors of a run are as large as they are; none takes more than the second.
_SMALL_BYTES, _MOST_BYTES = 1 << 20, 64 << 20
_MOST_MULTIPLICATIONS = 40_000_000
# From fewer elements on, torch leaves the convolution of a single sample to another library.
_FEWEST_ELEMENTS = 20_480
# Smaller integers may be a dimension, a kernel's width or a flag, as well as a size.
_LEAST_SIZE = 64
# Sizes change by multiples of this: what kernels pad channels and rows to.
_GRAIN = 64
_PIXEL_GRAIN = 16
# From so many samples on, oneDNN also takes what it leaves to others before.
_FULL_BATCH = 16
_FEW_CHANNELS = 3
# Channels come in blocks of these.
_BLOCK = 16
# A thread has so much of its own besides a gradient, at most: seen are 9 KB.
_THREAD_BYTES = 24 << 10
# Runs double with each.
_MOST_AXES = 5
_MOST_POWER = 4
# Attention takes more queries at a time from these lengths on.
_RUNGS = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default: (192, 768),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (192, 768),
}
# These trust that their sizes agree, and end the process if they do not.
_TRUSTING = frozenset({_aten._ctc_loss, _aten._ctc_loss_backward})
# Pivots count from 1, and a kernel that gets 0 reads what is before them; a bag of 0 is empty.
_COUNT_FROM_ONE = frozenset(
    {
        _aten.linalg_lu_solve.default,
        _aten.linalg_ldl_solve.default,
        _aten.lu_unpack.default,
        _aten._embedding_bag_backward.default,
    }
)


class _Axis(NamedTuple):
    """A size of a problem: what it is, what is run first, and how much larger it is then."""

    target: int
    base: int
    step: int


class _Problem(NamedTuple):
    """How an operation is made smaller.

    Attributes:
        sizes: those that may change.
        steps: how much each changes by.
        resized: returns the call with other sizes.
        excess: returns how many times too large it is to be run with those sizes.
    """

    sizes: Sequence[int]
    steps: Sequence[int]
    resized: Callable[[Sequence[int]], Tree]
    excess: Callable[[Sequence[int]], float]


def measured(func: Any, args: Any, kwargs: Any, result: Any) -> KernelRun:
    """Return what the kernel would allocate for this call.

    Raises:
        Exception: it can't be measured; the text says why.
    """
    call = mapped((tuple(args), dict(kwargs), result), layout_of)
    threads = torch.get_num_threads()
    problem = _convolution(func, call) if func in _CONVOLUTIONS else _by_value(func, call)
    if problem.excess(problem.sizes) <= 1 or func.overloadpacket in _TRUSTING:
        return _run(func, call, threads)
    if func is not _BACKWARD or threads == 1:
        return _extended(func, problem, threads)
    # How threads share it goes by its sizes. With filters of a pixel, one has another library.
    fewest = 1 if prod(call[0][2].shape[2:]) > 1 else 2
    alone = _extended(func, problem, fewest)
    more_bytes = _shared_bytes(call, threads)
    together = (more_bytes, *alone.events)
    if call[0][1].shape[1] <= _FEW_CHANNELS:
        # of images, each thread has a buffer for one
        own = _extended(func, problem, threads).events
        together = max(together, (threads * _THREAD_BYTES, *own), key=peak_of)
    return alone._replace(events=together)


def _shared_bytes(call: Tree, threads: int) -> int:
    """Return the most bytes that more threads than one take for a gradient of the weights.

    oneDNN gives each of them a gradient of its own only if that is less to read and write than
    what they would otherwise read twice: seen is up to a fifth of input and output.
    """
    grad, x, weight = call[0][:3]
    size = max(4, weight.dtype.itemsize)
    channels = prod(-(-n // _BLOCK) * _BLOCK for n in weight.shape[:2])
    copies = (threads - 1) * channels * prod(weight.shape[2:]) * size
    # with channels last it is another kernel
    if x.stride[1] != 1:
        copies = min(copies, (x.n_bytes + grad.n_bytes) * size // weight.dtype.itemsize // 4)
    return int(copies) + threads * _THREAD_BYTES


def _extended(func: Any, problem: _Problem, threads: int) -> KernelRun:
    try:
        axes = _axes(func, problem)
        runs = {}
        for corner in _corners(axes):
            sizes = [axis.base + axis.step * (i in corner) for i, axis in enumerate(axes)]
            runs[corner] = _run(func, problem.resized(sizes), threads)
        return _grown(axes, runs)
    # its sizes depend on each other
    except Exception:
        return _run(func, problem.resized(problem.sizes), threads)


def _run(func: Any, call: Tree, threads: int) -> KernelRun:
    if total_bytes(call) > _MOST_BYTES:
        raise ValueError("it is too large to be run")
    # no index is out of range that is 0; nothing is divided by 0 that is 1
    whole = int(func in _COUNT_FROM_ONE or torch.Tag.pointwise in func.tags)

    def make() -> Tree:
        args, kwargs = _made(call, "cpu", whole)
        return (_after_forward(args) if func is _LSTM_BACKWARD else args), kwargs

    return run(func, make, threads)


def _after_forward(args: Any) -> Any:
    """Have a forward pass fill the workspace, which the backward kernel trusts."""
    with torch.enable_grad():
        made = _LSTM(*args[:7], args[13], args[20], *args[14:18], args[19], args[21], args[18])
    return (*args[:7], *made[:3], *args[10:22], made[3])


def _made(call: Tree, device: str, whole: int) -> Tree:
    def make(leaf: Any) -> Any:
        if isinstance(leaf, Layout):
            return leaf.tensor(device, whole)
        # drawing from the program's own would change its numbers
        return torch.Generator() if isinstance(leaf, torch.Generator) else leaf

    return mapped(call[:2], make)


# --- smaller problems


def _by_value(func: Any, call: Tree) -> _Problem:
    kept = {n for each in layouts(call[0][1:5]) for n in each.shape} if func in _LSTMS else set()
    found = {n for each in layouts(call) for n in each.shape if n >= _LEAST_SIZE}
    sizes = sorted(found - kept)

    def resized(others: Sequence[int]) -> Tree:
        by_size = dict(zip(sizes, others, strict=True))

        def shrink(leaf: Any) -> Any:
            if isinstance(leaf, Layout):
                return leaf.resized([by_size.get(n, n) for n in leaf.shape])
            return by_size.get(leaf, leaf) if type(leaf) is int else leaf

        return mapped(call, shrink)

    def excess(others: Sequence[int]) -> float:
        return total_bytes(resized(others)) / _SMALL_BYTES

    return _Problem(sizes, [_GRAIN] * len(sizes), resized, excess)


def _convolution(func: Any, call: Tree) -> _Problem:
    """Fewer samples and pixels: oneDNN chooses how to compute by channels, kernel and strides."""
    args, kwargs, out = call
    before = args[:1] if func is _BACKWARD else ()
    x, weight, bias, *settings = args[len(before) :]
    stride, is_transposed = settings[0], settings[3]
    n_dims = len(x.shape) - 2
    strides = [1] * n_dims if is_transposed else (list(stride) * n_dims)[:n_dims]
    # a filter of one pixel is left to another library on one thread if samples are few
    is_one = torch.get_num_threads() == 1 and prod(weight.shape[2:]) == 1
    samples = _FULL_BATCH if is_one else max(2, torch.get_num_threads())
    steps = [samples, *(_PIXEL_GRAIN * n for n in strides)]

    def resized(sizes: Sequence[int]) -> Tree:
        small = x.resized((sizes[0], x.shape[1], *sizes[1:]))
        shape = _shape_of(small, weight, *settings[:6])
        grad = [each.resized(shape) for each in before]
        return (*grad, small, weight, bias, *settings), kwargs, out and small.resized(shape)

    def excess(sizes: Sequence[int]) -> float:
        pixels = prod(n // s for n, s in zip(sizes[1:], strides, strict=True))
        elements = sizes[0] * x.shape[1] * prod(sizes[1:])
        is_least = elements <= 2 * _FEWEST_ELEMENTS
        multiplications = sizes[0] * prod(weight.shape) * pixels
        return 0 if is_least else multiplications / _MOST_MULTIPLICATIONS

    return _Problem([x.shape[0], *x.shape[2:]], steps, resized, excess)


def _shape_of(x: Layout, weight: Layout, *settings: Any) -> tuple[int, ...]:
    with aside():
        made = [torch.empty(each.shape, device="meta") for each in (x, weight)]
        return tuple(_FORWARD(*made, None, *settings).shape)


def _axes(func: Any, problem: _Problem) -> list[_Axis]:
    """Halve the largest size until the problem is small, then see which sizes may change."""
    sizes = [*problem.sizes]
    rungs = _RUNGS.get(func, ())
    floors = [max((rung for rung in rungs if rung <= n), default=0) for n in sizes]
    while problem.excess(sizes) > 1:
        smaller = [_halved(n, step) for n, step in zip(sizes, problem.steps, strict=True)]
        able = [i for i, n in enumerate(sizes) if floors[i] <= smaller[i] < n]
        if not able:
            break
        largest = max(able, key=lambda i: sizes[i] / problem.steps[i])
        sizes[largest] = smaller[largest]
    changes = [
        [(target, 0), (small, step)][small < target]
        for target, small, step in zip(problem.sizes, sizes, problem.steps, strict=True)
    ]
    if not _is_allowed(func, problem, changes):
        for i, (base, step) in enumerate(changes):
            alone = [(n, 0) for n in problem.sizes]
            alone[i] = (base, step)
            if step and not _is_allowed(func, problem, alone):
                changes[i] = (problem.sizes[i], 0)
    return [_Axis(n, *change) for n, change in zip(problem.sizes, changes, strict=True)]


def _is_allowed(func: Any, problem: _Problem, changes: list[tuple[int, int]]) -> bool:
    """Tell whether torch's checks of shapes accept the smallest problem, and the next ones."""
    for more in {0, *(i + 1 for i, (_, step) in enumerate(changes) if step)}:
        sizes = [base + step * (i + 1 == more) for i, (base, step) in enumerate(changes)]
        try:
            with aside():
                args, kwargs = _made(problem.resized(sizes), "meta", 0)
                func(*args, **kwargs)
        except NotImplementedError:
            continue
        except Exception:
            return False
    return True


def _halved(n: int, grain: int) -> int:
    blocks = n // grain
    return grain * (blocks // 2) + n % grain if blocks > 1 else n


# --- from smaller problems to the whole

_Corner = frozenset[int]


def _corners(axes: list[_Axis]) -> list[_Corner]:
    """Return every choice of the axes that change, none of them first."""
    moving = [i for i, axis in enumerate(axes) if axis.step]
    if len(moving) > _MOST_AXES:
        raise ValueError("its sizes are too many to be made smaller one by one")
    return [frozenset(each) for n in range(len(moving) + 1) for each in combinations(moving, n)]


def _grown(axes: list[_Axis], runs: dict[_Corner, KernelRun]) -> KernelRun:
    events = {corner: each.events for corner, each in runs.items()}
    if len({tuple(n_bytes > 0 for n_bytes in each) for each in events.values()}) > 1:
        # a loop over the samples allocates in each turn
        events = {corner: (peak_of(each),) for corner, each in events.items()}
    sizes = {corner: each.made_bytes for corner, each in runs.items()}
    made = runs[frozenset()].made
    return KernelRun(_all_sizes(axes, events), made, _all_sizes(axes, sizes), is_grown=True)


def _all_sizes(axes: list[_Axis], at: dict[_Corner, tuple[int, ...]]) -> tuple[int, ...]:
    signs = at[frozenset()]
    sizes = [_size(axes, {c: abs(each[i]) for c, each in at.items()}) for i in range(len(signs))]
    return tuple(-n if sign < 0 else n for n, sign in zip(sizes, signs, strict=True))


def _size(axes: list[_Axis], at: dict[_Corner, int]) -> int:
    base = at[frozenset()]
    far = [_distance(axis, base, at.get(frozenset({i}), base)) for i, axis in enumerate(axes)]
    total = Fraction(0)
    for corner in at:
        inner = (frozenset(s) for n in range(len(corner) + 1) for s in combinations(corner, n))
        change = sum((-1) ** (len(corner) - len(each)) * at[each] for each in inner)
        total += change * prod((far[i] for i in corner), start=Fraction(1))
    return max(-(-total.numerator // total.denominator), *at.values())


def _distance(axis: _Axis, at_base: int, at_step: int) -> Fraction:
    """Return how many steps it is from the base of an axis to its target, as one block sees it."""
    if not axis.step:
        return Fraction(0)
    low, high = axis.base, axis.base + axis.step
    power = 1
    grown = Fraction(at_step, at_base or 1)
    while power < _MOST_POWER and at_base and Fraction(high, low) ** power < grown:
        power += 1
    return Fraction(axis.target**power - low**power, high**power - low**power)
