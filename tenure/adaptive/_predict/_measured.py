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
# Where these leave a problem too large to be run, as maps of 96 pixels do, also smaller sizes
# change, by less, and no more than they have to.
_LEAST_FINE_SIZE, _FINE_GRAIN, _FINE_BYTES = 16, 8, _MOST_BYTES // 4
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
# From these sizes on a kernel computes in another way, and below the first they stay. Attention
# takes more queries at a time; small images are resized as channels last, which is decided by the
# sum of height and width.
_RUNGS = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default: (0, 192, 768),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (0, 192, 768),
    _aten.upsample_nearest2d.default: (65,),
    _aten._upsample_nearest_exact2d.default: (65,),
    _aten.upsample_bilinear2d.default: (65,),
    _aten.upsample_trilinear3d.default: (65,),
    _aten.upsample_nearest3d.default: (65,),
    _aten._upsample_nearest_exact3d.default: (65,),
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
    problem = _by_large_values(func, call, _LEAST_SIZE, _GRAIN, _SMALL_BYTES)
    # the largest that would be run
    sizes = [min(n, 3 * _GRAIN + n % _GRAIN) for n in problem.sizes]
    if _total_bytes(problem.resized(sizes)) <= _MOST_BYTES:
        return problem
    return _by_large_values(func, call, _LEAST_FINE_SIZE, _FINE_GRAIN, _FINE_BYTES)


def _by_large_values(
    func: Any, call: Tree, least_size: int, grain: int, small_bytes: int
) -> _Problem:
    found = {n for each in _layouts(call) for n in each.shape if n >= least_size}
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
        return _total_bytes(resized(others)) / small_bytes

    return _Problem(sizes, [grain] * len(sizes), resized, excess)


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

    def after(self, n_steps: int) -> int:
        """Return the size after some steps from the first."""
        return self.base + n_steps * self.step

    @property
    def n_steps(self) -> int:
        """The number of steps to the target."""
        return (self.target - self.base) // self.step if self.step else 0


def _axes(func: Any, problem: _Problem) -> list[_Axis]:
    """Make the sizes smaller that may change: they depend on none that stays."""
    everything = range(len(problem.sizes))
    axes = _smaller(func, problem, everything)
    if _is_allowed(func, problem, axes):
        return axes
    whole = [_Axis(n, n, 0) for n in problem.sizes]
    alone = {i: [*whole[:i], axes[i], *whole[i + 1 :]] for i in everything if axes[i].step}
    may_change = [i for i, each in alone.items() if _is_allowed(func, problem, each)]
    return _smaller(func, problem, may_change)


def _smaller(func: Any, problem: _Problem, may_change: Sequence[int]) -> list[_Axis]:
    """Halve the largest size that may change until the problem is small."""
    sizes = [*problem.sizes]
    rungs = _RUNGS.get(func, (0,))
    floors = [max((rung for rung in rungs if rung <= n), default=n) for n in sizes]
    while problem.excess(sizes) > 1:
        smaller = [_halved(n, step) for n, step in zip(sizes, problem.steps, strict=True)]
        able = [i for i in may_change if floors[i] <= smaller[i] < sizes[i]]
        if not able:
            break
        largest = max(able, key=lambda i: sizes[i] / problem.steps[i])
        sizes[largest] = smaller[largest]
    return [
        _Axis(target, small, step if small < target else 0)
        for target, small, step in zip(problem.sizes, sizes, problem.steps, strict=True)
    ]


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
    runs: dict[tuple[int, ...], KernelRun] = {}
    try:
        axes = _axes(func, problem)

        def run_at(steps: tuple[int, ...]) -> None:
            sizes = [axis.after(n) for axis, n in zip(axes, steps, strict=True)]
            runs[steps] = _run(func, problem.resized(sizes), threads)

        # every choice of the sizes that change, none of them first
        corners = list(product(*((0, 1) if axis.step else (0,) for axis in axes)))
        if len(corners) > _MOST_CORNERS:
            raise ValueError("its sizes are too many to be made smaller one by one")
        for corner in corners:
            run_at(corner)
        for i, axis in enumerate(axes):
            if axis.n_steps > 1 and _may_bend(axis, runs[corners[0]], runs[_along(axes, i, 1)]):
                run_at(_along(axes, i, 2))
    # its sizes depend on each other
    except Exception:
        return _run(func, problem.resized(problem.sizes), threads)
    events = {steps: each.events for steps, each in runs.items()}
    if len({tuple(n_bytes > 0 for n_bytes in each) for each in events.values()}) > 1:
        # a loop over the samples allocates in each turn
        events = {steps: (peak_of(each),) for steps, each in events.items()}

    def grown(rows: dict[tuple[int, ...], tuple[int, ...]]) -> tuple[int, ...]:
        sizes = []
        for column in zip(*rows.values(), strict=True):
            n_bytes = _size(axes, dict(zip(rows, map(abs, column), strict=True)))
            sizes.append(-n_bytes if column[0] < 0 else n_bytes)
        return tuple(sizes)

    made_bytes = grown({steps: each.made_bytes for steps, each in runs.items()})
    return KernelRun(grown(events), runs[corners[0]].made, made_bytes, True)


def _along(axes: list[_Axis], i: int, n_steps: int) -> tuple[int, ...]:
    """Return the steps of a run that is so many from the base along one axis alone."""
    return tuple(n_steps * (i == j) for j in range(len(axes)))


def _may_bend(axis: _Axis, base: KernelRun, first: KernelRun) -> bool:
    """Tell whether some block may grow faster than a size: one of two runs does not say."""
    ratio = Fraction(axis.after(1), axis.base)
    events = base.events, first.events
    pairs = [*zip(*events, strict=False), *zip(base.made_bytes, first.made_bytes, strict=True)]
    is_other = len(events[0]) != len(events[1])
    return is_other or any(abs(after) > ratio * abs(before) > 0 for before, after in pairs)


def _size(axes: list[_Axis], at: dict[tuple[int, ...], int]) -> int:
    """Return the bytes of a block at the target, by those at the corners of a box."""
    far = []
    for i, axis in enumerate(axes):
        first, second = (at.get(_along(axes, i, n)) for n in (1, 2))
        far.append(_distance(axis, at[_along(axes, i, 0)], first, second))
    total = sum(
        n_bytes * prod(way if bit else 1 - way for way, bit in zip(far, corner, strict=True))
        for corner, n_bytes in at.items()
        if max(corner, default=0) < 2
    )
    return max(ceil(total), *at.values())


def _distance(axis: _Axis, at_base: int, at_first: int | None, at_second: int | None) -> Fraction:
    """Return how many steps it is from the base of an axis to its target, as one block sees it."""
    n = axis.n_steps
    if at_first is None or at_second is None or at_first == at_base:
        return Fraction(n)
    grown = at_first - at_base

    def way(power: int, n_steps: int) -> Fraction:
        low, high, far = (axis.after(i) ** power for i in (0, 1, n_steps))
        return Fraction(far - low, high - low)

    # of a line and powers, the one that foretells the second step
    power = min(
        range(1, _MOST_POWER + 1), key=lambda p: abs(way(p, 2) * grown - at_second + at_base)
    )
    if power != 2:
        return way(power, n)
    # a square may begin anywhere: (n - 2)² of windows
    bend = at_second - 2 * at_first + at_base
    return n + Fraction(n * (n - 1) // 2 * bend, grown)
