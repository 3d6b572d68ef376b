"""Run a kernel once for each signature: as it is while it is small, else on smaller problems.

Each block that it allocates is taken to grow along each size as a straight line, with all products
of sizes: exact for tensors, padded copies and buffers, of which all corners of the smallest box are
measured. A block that grows faster than a size, as the scores of attention do with the length,
grows with a power of it.

Sizes are told apart by their values: where 4096 is made smaller in one argument, it is in all of
them, in shapes and among plain integers. A size whose change torch's own checks of shapes refuse
stays as it is.

A kernel runs on made-up tensors and on a thread of its own: no mode, no autocast, no profiler and
no graph of the program is there. Random numbers are as before afterwards. See Note [Layouts in
predictions], rules 2 and 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from math import ceil, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tenure._containers import passed_tensors
from tenure._torch.allocations import begin, end
from tenure._torch.fakes import negative_view
from tenure._torch.quiet import aside
from tenure._torch.storages import key_of

_aten = torch.ops.aten
_FORWARD, _BACKWARD = _aten.convolution.default, _aten.convolution_backward.default
_LSTM, _LSTM_BACKWARD = _aten.mkldnn_rnn_layer.default, _aten.mkldnn_rnn_layer_backward.default

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
# Of five sizes that change; runs double with each.
_MOST_CORNERS = 32
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


# --- arguments without their data

Tree = Any
"""Arguments or results: containers, with a `Layout` for each tensor."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Everything about a strided tensor that a kernel may allocate by."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_conj: bool = False
    is_neg: bool = False

    @property
    def n_bytes(self) -> int:
        """The bytes from its first element to its last."""
        if 0 in self.shape:
            return 0
        pairs = zip(self.shape, self.stride, strict=True)
        return (1 + sum((n - 1) * s for n, s in pairs)) * self.dtype.itemsize

    def resized(self, shape: Sequence[int]) -> Layout:
        """Return another shape in the same order, with the same gaps and the same expansion."""
        stride = [0] * len(self.shape)
        extent, before = 1, 1
        # from the innermost dimension out; of equal strides the one of size 1 is the inner one
        for d in sorted(range(len(shape)), key=lambda d: (self.stride[d], self.shape[d], -d)):
            if self.stride[d]:
                stride[d] = extent * max(1, -(-self.stride[d] // before))
                before = self.stride[d] * max(1, self.shape[d])
                extent = stride[d] * max(1, shape[d])
        return replace(self, shape=tuple(shape), stride=tuple(stride))

    def tensor(self, device: str, whole: int) -> Tensor:
        """Make a tensor: numbers are 0.5, masks are true, whole numbers are ``whole``."""
        is_number = self.dtype.is_floating_point or self.dtype.is_complex
        value = 0.5 if is_number else True if self.dtype is torch.bool else whole
        n_elements = self.n_bytes // self.dtype.itemsize
        flat = torch.full((n_elements,), value, dtype=self.dtype, device=device)
        made = flat.as_strided(self.shape, self.stride)
        made = made.conj() if self.is_conj else made
        return negative_view(made) if self.is_neg else made


def layout_of(leaf: Any) -> Any:
    """Return the layout of a tensor, fake or not, and anything else as it is."""
    if not isinstance(leaf, Tensor):
        return leaf
    flags = leaf.is_conj(), leaf.is_neg()
    return Layout(tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype, *flags)


def mapped(tree: Tree, change: Callable[[Any], Any]) -> Tree:
    """Change every leaf of nested containers."""
    if isinstance(tree, (list, tuple)):
        return type(tree)([mapped(each, change) for each in tree])
    if isinstance(tree, dict):
        return {key: mapped(each, change) for key, each in tree.items()}
    return change(tree)


def _layouts(tree: Tree) -> list[Layout]:
    found: list[Any] = []
    mapped(tree, found.append)
    return [each for each in found if isinstance(each, Layout)]


def _total_bytes(tree: Tree) -> int:
    return sum(each.n_bytes for each in _layouts(tree))


def _made(call: Tree, device: str, whole: int) -> Tree:
    def make(leaf: Any) -> Any:
        if isinstance(leaf, Layout):
            return leaf.tensor(device, whole)
        # drawing from the program's own would change its numbers
        return torch.Generator() if isinstance(leaf, torch.Generator) else leaf

    return mapped(call[:2], make)


# --- one run


class KernelRun(NamedTuple):
    """One call of a kernel.

    Attributes:
        events: bytes allocated (positive) and freed (negative), in order.
        made: the layouts of the tensors that it returned; None for memory that it was given, or
            that an earlier one of them has.
        made_bytes: the bytes of their storages.
        is_grown: whether it is told from smaller problems.
    """

    events: tuple[int, ...]
    made: tuple[Layout | None, ...]
    made_bytes: tuple[int, ...]
    is_grown: bool = False


def peak_of(events: Iterable[int]) -> int:
    """Return the most bytes that are live at once."""
    live = peak = 0
    for n_bytes in events:
        live += n_bytes
        peak = max(peak, live)
    return peak


def run(func: Any, make: Callable[[], tuple[Any, dict[str, Any]]], threads: int) -> KernelRun:
    """Run an operation on the tensors that ``make`` returns, on so many threads.

    Raises:
        Exception: whatever the kernel or ``make`` raised.
    """
    grad = torch.is_grad_enabled()

    def work() -> KernelRun:
        # a new thread takes over the program's number only when it is asked for
        before = torch.get_num_threads()
        if threads != before:
            torch.set_num_threads(threads)
        try:
            # some kernels keep more for a backward pass
            with torch.set_grad_enabled(grad):
                return _run_here(func, make)
        finally:
            if threads != before:
                torch.set_num_threads(before)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def _run_here(func: Any, make: Callable[[], tuple[Any, dict[str, Any]]]) -> KernelRun:
    draws = torch.Tag.nondeterministic_seeded in func.tags
    state = torch.random.get_rng_state() if draws else None
    try:
        args, kwargs = make()
        begin()
        try:
            result = func(*args, **kwargs)
        finally:
            changes = end()
    finally:
        if state is not None:
            torch.random.set_rng_state(state)
    if changes is None:
        raise RuntimeError("another profiler ended the session in which a kernel was measured")
    seen = {key_of(each.untyped_storage()) for each in passed_tensors((args, kwargs))}
    made: list[Layout | None] = []
    sizes: list[int] = []
    for tensor in passed_tensors(result):
        storage = tensor.untyped_storage()
        is_new = tensor.layout is torch.strided and key_of(storage) not in seen
        seen.add(key_of(storage))
        made.append(layout_of(tensor) if is_new else None)
        sizes.append(storage.nbytes() if is_new else 0)
    return KernelRun(tuple(changes.cpu), tuple(made), tuple(sizes))


def _run(func: Any, call: Tree, threads: int) -> KernelRun:
    if _total_bytes(call) > _MOST_BYTES:
        raise ValueError("it is too large to be run")
    # no index is out of range that is 0; nothing is divided by 0 that is 1
    whole = int(func in _COUNT_FROM_ONE or torch.Tag.pointwise in func.tags)

    def make() -> Tree:
        args, kwargs = _made(call, "cpu", whole)
        if func is _LSTM_BACKWARD:
            # a forward pass fills the workspace, which the kernel trusts
            given = args[:7], (args[13], args[20]), args[14:18], (args[19], args[21], args[18])
            with torch.enable_grad():
                output = _LSTM(*sum(map(tuple, given), ()))
            args = (*args[:7], *output[:3], *args[10:22], output[3])
        return args, kwargs

    return run(func, make, threads)


def measured(func: Any, args: Any, kwargs: Any, result: Any) -> KernelRun:
    """Return what the kernel would allocate for this call.

    Raises:
        Exception: it can't be measured; the text says why.
    """
    call = mapped((tuple(args), dict(kwargs), result), layout_of)
    threads = torch.get_num_threads()
    is_convolution = func in (_FORWARD, _BACKWARD)
    problem = _convolution(func, call) if is_convolution else _by_value(func, call)
    if problem.excess(problem.sizes) <= 1 or func.overloadpacket in _TRUSTING:
        return _run(func, call, threads)
    if func is not _BACKWARD or threads == 1:
        return _extended(func, problem, threads)
    # How threads share it goes by its sizes. With filters of a pixel, one has another library.
    fewest = 1 if prod(call[0][2].shape[2:]) > 1 else 2
    alone = _extended(func, problem, fewest)
    together = (_shared_bytes(call, threads), *alone.events)
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


# --- smaller problems


class _Problem(NamedTuple):
    """An operation that can be made smaller.

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


def _by_value(func: Any, call: Tree) -> _Problem:
    found = {n for each in _layouts(call) for n in each.shape if n >= _LEAST_SIZE}
    if func in (_LSTM, _LSTM_BACKWARD):
        found -= {n for each in _layouts(call[0][1:5]) for n in each.shape}
    sizes = sorted(found)

    def resized(others: Sequence[int]) -> Tree:
        by_size = dict(zip(sizes, others, strict=True))

        def shrink(leaf: Any) -> Any:
            if isinstance(leaf, Layout):
                return leaf.resized([by_size.get(n, n) for n in leaf.shape])
            return by_size.get(leaf, leaf) if type(leaf) is int else leaf

        return mapped(call, shrink)

    def excess(others: Sequence[int]) -> float:
        return _total_bytes(resized(others)) / _SMALL_BYTES

    return _Problem(sizes, [_GRAIN] * len(sizes), resized, excess)


def _convolution(func: Any, call: Tree) -> _Problem:
    """Fewer samples and pixels: oneDNN chooses how to compute by channels, kernel and strides."""
    args, kwargs, out = call
    before = args[:1] if func is _BACKWARD else ()
    x, weight, bias, *settings = args[len(before) :]
    n_dims = len(x.shape) - 2
    is_transposed = settings[3]
    strides = [1] * n_dims if is_transposed else (list(settings[0]) * n_dims)[:n_dims]
    # a filter of one pixel is left to another library on one thread if samples are few
    is_one = torch.get_num_threads() == 1 and prod(weight.shape[2:]) == 1
    samples = _FULL_BATCH if is_one else max(2, torch.get_num_threads())

    def resized(sizes: Sequence[int]) -> Tree:
        small = x.resized((sizes[0], x.shape[1], *sizes[1:]))
        with aside():
            made = [torch.empty(each.shape, device="meta") for each in (small, weight)]
            shape = _FORWARD(*made, None, *settings[:6]).shape
        grad = [each.resized(shape) for each in before]
        return (*grad, small, weight, bias, *settings), kwargs, out and small.resized(shape)

    def excess(sizes: Sequence[int]) -> float:
        if sizes[0] * x.shape[1] * prod(sizes[1:]) <= 2 * _FEWEST_ELEMENTS:
            return 0
        pixels = prod(n // s for n, s in zip(sizes[1:], strides, strict=True))
        return float(sizes[0] * prod(weight.shape) * pixels / _MOST_MULTIPLICATIONS)

    steps = [samples, *(_PIXEL_GRAIN * n for n in strides)]
    return _Problem([x.shape[0], *x.shape[2:]], steps, resized, excess)


class _Axis(NamedTuple):
    """A size of a problem: what it is, what is run first, and how much larger it is then."""

    target: int
    base: int
    step: int


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
    whole = [_Axis(n, n, 0) for n in problem.sizes]
    axes = [
        _Axis(target, small, step) if small < target else _Axis(target, target, 0)
        for target, small, step in zip(problem.sizes, sizes, problem.steps, strict=True)
    ]
    if not _is_allowed(func, problem, axes):
        for i, axis in enumerate(axes):
            if not _is_allowed(func, problem, [*whole[:i], axis, *whole[i + 1 :]]):
                axes[i] = whole[i]
    return axes


def _is_allowed(func: Any, problem: _Problem, axes: list[_Axis]) -> bool:
    """Tell whether torch's checks of shapes accept the smallest problem, and the next ones."""
    for more in (None, *(axis for axis in axes if axis.step)):
        sizes = [axis.base + axis.step * (axis is more) for axis in axes]
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


def _extended(func: Any, problem: _Problem, threads: int) -> KernelRun:
    try:
        axes = _axes(func, problem)
        # every choice of the sizes that change, none of them first
        corners = list(product(*((0, 1) if axis.step else (0,) for axis in axes)))
        if len(corners) > _MOST_CORNERS:
            raise ValueError("its sizes are too many to be made smaller one by one")
        runs = []
        for corner in corners:
            sizes = [axis.base + axis.step * bit for axis, bit in zip(axes, corner, strict=True)]
            runs.append(_run(func, problem.resized(sizes), threads))
    # its sizes depend on each other
    except Exception:
        return _run(func, problem.resized(problem.sizes), threads)
    events = [each.events for each in runs]
    if len({tuple(n_bytes > 0 for n_bytes in each) for each in events}) > 1:
        # a loop over the samples allocates in each turn
        events = [(peak_of(each),) for each in events]

    def grown(rows: list[tuple[int, ...]]) -> tuple[int, ...]:
        sizes = []
        for column in zip(*rows, strict=True):
            n_bytes = _size(axes, dict(zip(corners, map(abs, column), strict=True)))
            sizes.append(-n_bytes if column[0] < 0 else n_bytes)
        return tuple(sizes)

    return KernelRun(grown(events), runs[0].made, grown([r.made_bytes for r in runs]), True)


def _size(axes: list[_Axis], at: dict[tuple[int, ...], int]) -> int:
    """Return the bytes of a block at the target, by those at the corners of a box."""
    base = at[(0,) * len(axes)]
    far: list[Fraction] = []
    for i, axis in enumerate(axes):
        first = at.get(tuple(int(i == j) for j in range(len(axes))), base)
        far.append(_distance(axis, base, first))
    total = sum(
        n_bytes * prod(way if bit else 1 - way for way, bit in zip(far, corner, strict=True))
        for corner, n_bytes in at.items()
    )
    return max(ceil(total), *at.values())


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
