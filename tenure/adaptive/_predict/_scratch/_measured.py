"""Scratch that is measured: the kernel itself runs, once for each signature, on a small problem."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from . import _convolutions, _problem
from ._events import Events, events_of, peak_of
from ._extrapolation import Axis, Corner, corners, grown
from ._matmuls import RULES as MATMULS
from ._problem import Call

_aten = torch.ops.aten

# What all tensors of a run may take together.
_WHOLE_BYTES = 256 << 10
_PART_BYTES = 1 << 20
WHOLE_PRODUCT_BYTES = 2 << 20
"""Products of matrices of 16 bits up to this are run as they are; of others a bound is told."""
# Runs double with each.
_MOST_AXES = 5
_MOST_POWER = 4
# Attention takes more queries at a time from these lengths on.
_RUNGS = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default: (192, 768),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (192, 768),
}

# Pivots count from 1, and a kernel that gets 0 reads what is before them.
_COUNT_FROM_ONE = frozenset(
    {_aten.linalg_lu_solve.default, _aten.linalg_ldl_solve.default, _aten.lu_unpack.default}
)

_MOST_KNOWN = 4096
"""Signatures whose scratch is kept, because sizes that differ in each call would pile up."""
_known: dict[Any, int | str] = {}


def measured(func: Any, args: Any, kwargs: Any, result: Any, out_bytes: int) -> int | str:
    """Bytes of scratch of a call; or why they can't be measured."""
    call = _problem.described(args, kwargs)
    key = (func, repr(call), _settings())
    known = _known.get(key)
    if known is None:
        known = _measure(func, call, _problem.described((result,), {}), out_bytes)
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[key] = known
    return known


def _settings() -> tuple[object, ...]:
    """What kernels are chosen by besides their arguments."""
    return (
        torch.get_num_threads(),
        torch.backends.mkldnn.enabled,
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
    )


def _measure(func: Any, call: Call, out: Any, out_bytes: int) -> int | str:
    n_bytes = sum(each.n_bytes for each in [*_problem.layouts(call), *_problem.layouts(out)])
    if n_bytes <= (WHOLE_PRODUCT_BYTES if func in MATMULS else _WHOLE_BYTES):
        return _told(_run(func, call), out_bytes)
    if _convolutions.is_one(func):
        return _measure_convolution(func, call, out_bytes)
    axes = _problem.axes_of(call, out, _PART_BYTES, _RUNGS.get(func, ()))
    shrink = partial(_problem.smaller, call, axes)
    return _told(_extended(func, axes, shrink, _MOST_POWER), out_bytes)


def _measure_convolution(func: Any, call: Call, out_bytes: int) -> int | str:
    """Run on one thread where threads share it: how they do goes by sizes."""
    backend = _convolutions.backend_of(func, call)
    threads = torch.get_num_threads()
    shared = _convolutions.is_shared(func)

    def on(n_threads: int) -> int | str:
        with _threads(n_threads):
            axes = _convolutions.axes_of(func, call, backend)
            shrink = partial(_convolutions.smaller, func, call, axes)
            return _told(_extended(func, axes, shrink, 1), out_bytes)

    alone = on(1 if shared else threads)
    if isinstance(alone, str) or not shared or threads == 1:
        return alone
    together = alone + _convolutions.shared_bytes(func, call)
    if _convolutions.takes_few_channels(func, call):
        # each thread more takes as much as the third does
        two, three = on(2), on(3)
        if isinstance(two, str) or isinstance(three, str):
            return two if isinstance(two, str) else three
        more = two + (threads - 2) * max(0, three - two)
        together = max(together, more + threads * _convolutions.THREAD_BYTES)
    return together


@contextmanager
def _threads(n_threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if n_threads == before:
        yield
        return
    torch.set_num_threads(n_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _extended(
    func: Any, axes: list[Axis], shrink: Callable[[Corner], Call], most_power: int
) -> Events | Exception:
    """Run at every corner, and tell what it would be at the targets."""
    if sum(axis.step > 0 for axis in axes) > _MOST_AXES:
        return ValueError("its sizes are too many to be made smaller one by one")
    runs: dict[Corner, Events] = {}
    for corner in corners(axes):
        events = _run(func, shrink(corner))
        if isinstance(events, Exception):
            return events
        runs[corner] = events
    return grown(axes, runs, most_power)


def _run(func: Any, call: Call) -> Events | Exception:
    # no index is out of range that is 0; nothing is divided by 0 that is 1
    whole = int(func in _COUNT_FROM_ONE or torch.Tag.pointwise in func.tags)
    return events_of(func, lambda: _problem.made(call, whole))


def _told(events: Events | Exception, out_bytes: int) -> int | str:
    if isinstance(events, Exception):
        return f"{type(events).__name__}: {events}".splitlines()[0]
    return max(0, peak_of(events) - out_bytes)
