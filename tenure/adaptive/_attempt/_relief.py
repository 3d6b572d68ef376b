"""Making room after an out-of-memory error, so that the same size may fit after all.

What there was at the moment of the error is noted within ``except``, and told where it helps
nobody. Each way to make room gives a number of bytes, and only where those promise that a second
try is not in vain; called outside of ``except``, when the failed attempt has been let go.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import psutil
import torch

from tenure._devices import accelerator_of
from tenure._oom import OomInfo, unallocated_bytes_in
from tenure._registries import ask_to_shrink
from tenure._text import format_bytes
from tenure._torch.device_allocator import clear_workspaces, has_expandable_segments
from tenure._torch.quiet import without_functions

from .._memory import held_by, meter_for

_HOST = (None, "cpu")
_OUTSIDE_THE_ALLOCATOR = ("workspace", "driver")
"""Kinds of memory that a library or the driver wanted, and that torch's cache may have taken."""
_NOISE_BYTES = 1 << 20
"""The resident memory of a process may change by so much by itself."""
_ADVICE = "set PYTORCH_ALLOC_CONF=expandable_segments:True before the program starts"


class Relief:
    """The ways to make room, for one piece of work; none is taken twice where it can't help twice.

    Args:
        cache_is_empty: whether the work began with an empty cache, so that to empty it again
            promises nothing.

    Attributes:
        collected: whether garbage has been collected; what that frees is older than the work.
    """

    __slots__ = ("_asked_libraries", "_cache_is_empty", "collected")

    def __init__(self, *, cache_is_empty: bool = False) -> None:
        self._cache_is_empty = cache_is_empty
        self.collected = self._asked_libraries = False

    def make_room(self, info: OomInfo, unused_bytes: int | None) -> int:
        """Give memory back, so that the same size may fit.

        Args:
            info: the error.
            unused_bytes: as `unused_bytes_at` told at that moment.

        Returns:
            The bytes given back, if they promise that the same size fits now; 0 otherwise.
        """
        if info.kind == "size_limit":
            return 0
        _drain(info)
        # the cache once for a piece of work: what is in it after that, failed tries have put there
        freed_bytes = 0 if self._cache_is_empty else _free_cache(info, unused_bytes)
        self._cache_is_empty = True
        if not freed_bytes and info.device not in _HOST:
            freed_bytes = self._collect(info)
        return freed_bytes or _given_back(info)

    def last_resort(self, info: OomInfo) -> int:
        """Free what is expensive to free, before giving up: garbage, memory of libraries."""
        if info.device not in _HOST:
            return self._let_libraries_go(info)
        # For the host a collection comes only now: it takes the longer the more objects there are,
        # and cycles that hold as much as was wanted of a whole machine are rare.
        freed_bytes = self._collect(info)
        return freed_bytes if freed_bytes >= _NOISE_BYTES else 0

    def _let_libraries_go(self, info: OomInfo) -> int:
        """Free what torch keeps outside of tensors: casts of weights, workspaces of cuBLAS.

        The next attempt makes anew what it needs of them, so this comes last.
        """
        found, used_bytes = accelerator_of(info.device), _used_bytes_of(info.device)
        if self._asked_libraries or found is None or used_bytes is None:
            return 0
        self._asked_libraries = True
        module, device = found
        before_bytes = used_bytes()
        torch.clear_autocast_cache()
        clear_workspaces(device)
        freed_bytes = max(0, before_bytes - used_bytes())
        # what the workspaces lay in is cached now, and may be whole segments
        if freed_bytes:
            _empty_cache(module)
        return freed_bytes if info.requested_bytes is None or _serves(freed_bytes, info) else 0

    def _collect(self, info: OomInfo) -> int:
        """Collect cycles that hold memory, older ones: the attempt's are gone."""
        if self.collected:
            return 0
        self.collected = True
        used_bytes = _used_bytes_of(info.device)
        before_bytes = 0 if used_bytes is None else used_bytes()
        gc.collect()
        # it may have helped, but nothing tells
        if used_bytes is None:
            return 0
        freed_bytes = max(0, before_bytes - used_bytes())
        return freed_bytes if _serves(freed_bytes, info) else 0


def free_bytes_of(info: OomInfo) -> int | None:
    """Return the free memory of what was short, as a budget, the device or the host tells it."""
    meter, found = meter_for(info.device), accelerator_of(info.device)
    try:
        if meter is not None:
            # a program may lower a fraction below its use
            return max(0, meter.available_bytes())
        if found is None:
            return None
        module, device = found
        return int(module.mem_get_info(device)[0])
    # a device without statistics
    except Exception:
        return None


def _drain(info: OomInfo) -> None:
    """Let an asynchronous error that waits on the device surface here rather than in the retry."""
    found = accelerator_of(info.device)
    if found is None:
        return
    module, device = found
    # Waits for two things, each of which would take memory from the retry: autograd's thread, which
    # lets go of a failed pass late, and kernels that still use blocks of the attempt. Either may
    # raise what failed on the device, which is not what this is for.
    with contextlib.suppress(Exception):
        _wait_for_engine(device)
    with contextlib.suppress(Exception):
        try:
            module.synchronize(device)
        # MPS, of which there is one
        except TypeError:
            module.synchronize()


def _wait_for_engine(device: torch.device) -> None:
    """Wait until autograd's thread of a device has let go of what it ran last.

    A pass that fails wakes its caller first, and the thread lets go of the last node and its
    gradients a moment later: a retry would begin with less memory. It takes the next node, here one
    without any bytes or kernel, only when it is done with that.
    """
    # no scope of the program owns it
    with without_functions(), torch.inference_mode(False), torch.enable_grad():
        leaf = torch.empty(0, device=device, requires_grad=True)
        torch.autograd.grad(leaf.view(0), leaf, torch.empty(0, device=device))


def _free_cache(info: OomInfo, unused_bytes: int | None) -> int:
    """Give the allocator's cache back, if the request failed for how it was cut up.

    An allocator that runs out gives back by itself what nothing uses. Left are free parts of
    segments: those that the attempt held go back now, and a fresh start may use them better, while
    older tensors still hold theirs.
    """
    found = accelerator_of(info.device)
    if found is None or unused_bytes is None:
        return 0
    module, device = found
    before = held_by(module, device)
    # Of what was unused at the error, the free parts of segments in use can't be given back; what
    # stays is what the allocator could give, as one piece.
    set_free_bytes = unused_bytes - before.split_bytes
    if info.kind not in _OUTSIDE_THE_ALLOCATOR and not _serves(set_free_bytes, info):
        return 0
    _empty_cache(module)
    return max(0, before.reserved_bytes - held_by(module, device).reserved_bytes)


def _empty_cache(module: Any) -> None:
    # While another thread captures a graph it fails: that must not hide what ran out.
    with contextlib.suppress(RuntimeError):
        module.empty_cache()


def _used_bytes_of(device: str | None) -> Callable[[], int] | None:
    """Return what reads the bytes in use on a device; None if it has no such statistics."""
    if device in _HOST:
        return lambda: int(psutil.Process().memory_info().rss)
    found = accelerator_of(device)
    if found is None:
        return None
    module, place = found
    try:
        held_by(module, place)
    # a device without statistics
    except Exception:
        return None
    return lambda: held_by(module, place).allocated_bytes


def _given_back(info: OomInfo) -> int:
    """Return the bytes that pagers and caches gave back; 0 if known to be too few."""
    given_bytes = ask_to_shrink(info.device, info.requested_bytes)
    return given_bytes if info.requested_bytes is None or _serves(given_bytes, info) else 0


def _serves(n_bytes: int, info: OomInfo) -> bool:
    return info.requested_bytes is not None and n_bytes >= info.requested_bytes


def unused_bytes_at(info: OomInfo) -> int | None:
    """Return what the allocator held and no tensor used when memory ran out; None: nobody tells.

    Called inside ``except``. The error is of the moment when memory ran out. Since then, values
    that the interpreter held for the operation have died.
    """
    found, told_bytes = accelerator_of(info.device), unallocated_bytes_in(info.text)
    if told_bytes is not None or found is None:
        return told_bytes
    try:
        return held_by(*found).unused_bytes
    # a device without statistics
    except Exception:
        return None


def pieces_in(info: OomInfo) -> str:
    """Say that the free memory of the allocator would have sufficed in one piece; else ""."""
    unused_bytes, requested_bytes = unallocated_bytes_in(info.text), info.requested_bytes
    if unused_bytes is None or requested_bytes is None or unused_bytes < requested_bytes:
        return ""
    told = f"At the last, {format_bytes(unused_bytes)} were reserved and not allocated, in pieces"
    return f"{told}. " if has_expandable_segments() else f"{told}: {_ADVICE}. "
