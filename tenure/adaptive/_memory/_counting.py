"""A limit that is kept by counting: the mode that sees each operation of a thread.

Invariant: an operation whose results don't fit leaves the account, its arguments and the memory as
they were before it, those that it has enlarged in place too; only then is the error raised.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, UntypedStorage

from tenure._account import close_limit, open_limit
from tenure._containers import passed_tensors
from tenure._registries import refusal_watchers
from tenure._stream import run, storages_in, this_stream
from tenure._text import format_bytes
from tenure._torch.gradient_sums import prepare
from tenure._torch.modes import DispatchMode, open_modes, schema_of
from tenure._torch.quiet import without_dispatch, without_functions
from tenure._torch.resizing import tell, tell_no_more
from tenure._torch.storages import is_in_a_tensor, uses_by_torch

from ._live_storages import LiveStorages

_aten = torch.ops.aten
_LIFTS = frozenset({_aten.lift_fresh.default, _aten.lift.default})
"""What ``torch.tensor``, ``torch.from_numpy`` and the like call with the tensor they made."""
_CLOSED = -1
_RESIZERS = frozenset({_aten.resize_, _aten.resize_as_, _aten.set_})


class CountingMode(DispatchMode):
    """Counts the storages that operations make on a device, and refuses those past a limit.

    Attributes:
        recent_peak_bytes: the most that was alive after an operation since `restart_peak`.
    """

    supports_higher_order_operators = True

    def __init__(self, limit_bytes: int, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch left it unannotated
        self._limit_bytes = limit_bytes
        self._device = device
        self._account = LiveStorages(device)
        self._process = _CLOSED
        self._stream = this_stream()
        self._earlier_peak_bytes = 0
        self.recent_peak_bytes = 0

    @property
    def live_bytes(self) -> int:
        """The bytes alive now, or when the mode was closed."""
        self._account.measure_again()
        return self._account.live_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that was alive after an operation."""
        return max(self._earlier_peak_bytes, self.recent_peak_bytes)

    @property
    def free_bytes(self) -> int:
        """What may still be made."""
        return max(0, self._limit_bytes - self.live_bytes)

    def restart_peak(self) -> None:
        """Let the recent peak begin with what is alive now."""
        self._earlier_peak_bytes = self.peak_bytes
        self.recent_peak_bytes = self.live_bytes

    @property
    def closed(self) -> bool:
        """Whether it counts no more, though it may still stand on the stack of modes."""
        return self._process == _CLOSED

    def open(self) -> None:
        """Begin to count on this thread."""
        # asked here, because it can't be where the answer is needed: in the handler of an operation
        for inference in (False, True):
            uses_by_torch(inference)
        prepare()
        # a forked child has the mode on its stack, but not its limit
        self._process = os.getpid()
        self._stream = this_stream()
        self._stream.modes.append(self)
        try:
            open_limit(self)
            tell(self._note_resized)
            self.__enter__()  # type: ignore[no-untyped-call]
        except BaseException:
            tell_no_more(self._note_resized)
            # one that torch never had would keep the closed ones below it on torch's stack
            if self not in open_modes():
                self._stream.modes.remove(self)
            raise

    def close(self) -> bool:
        """Stop counting; False if a mode that was opened later is still open."""
        self._account.measure_again()
        self._process = _CLOSED
        close_limit(self)
        tell_no_more(self._note_resized)
        self._account.stop()
        in_order = open_modes()[-1:] == [self]
        _pop_closed(self._stream.modes)
        return in_order

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, count what it made, and refuse it if that is too much."""
        kwargs = kwargs or {}
        # closed, but below a mode that is open; or in a child that was forked
        if os.getpid() != self._process:
            return func(*args, **kwargs)
        with without_functions():
            places = self._before(func, args, kwargs)
        result = run(func, args, kwargs, mode=self, stream=self._stream, sums=self._note_sum)
        with without_functions():
            made_bytes = self._account.note_made(storages_in(result))
            if made_bytes > 0 and self._exceeds():
                # The traceback holds this frame: it must not hold what the operation made.
                result = args = kwargs = None
                _restore(places)
                places = []
                self._refuse(func, made_bytes)
        self.recent_peak_bytes = max(self.recent_peak_bytes, self._account.live_bytes)
        return result

    def _note_sum(self, first: UntypedStorage, total: UntypedStorage) -> None:
        with without_functions():
            self._account.note_summed(first, total)
            if total.device.type == "cpu":
                self._stream.hide_sum(total.nbytes())

    def note_taken(self, made: list[Tensor], what: str) -> None:
        """See `tenure._account.Limit`."""
        if os.getpid() != self._process:
            return
        made_bytes = self._account.note_made(storages_in(made))
        if made_bytes > 0 and self._exceeds():
            made.clear()
            self._refuse(what, made_bytes)
        self.recent_peak_bytes = max(self.recent_peak_bytes, self._account.live_bytes)

    def _note_resized(self, storage: UntypedStorage, n_bytes: int) -> None:
        """Count what a storage grows or shrinks by without an operation, and refuse too much."""
        if os.getpid() != self._process:
            return
        grown_bytes = self._account.note_resized(storage, n_bytes)
        if grown_bytes > 0 and self._account.live_bytes > self._limit_bytes:
            # it has its old size again then, which is right where it is refused
            self._account.measure_again()
            if self._account.live_bytes + grown_bytes > self._limit_bytes:
                self._refuse("resize_() of a storage", grown_bytes)
            self._account.note_resized(storage, n_bytes)
        self.recent_peak_bytes = max(self.recent_peak_bytes, self._account.live_bytes)

    def note_moved(self, before: UntypedStorage, after: UntypedStorage) -> None:
        """See `tenure._account.Limit`."""
        if os.getpid() == self._process:
            self._account.note_moved(before, after)

    def available_on(self, device: torch.device) -> int | None:
        """See `tenure._account.Limit`."""
        return self.free_bytes if device == self._device and not self.closed else None

    def counts(self, storage: UntypedStorage) -> bool:
        """See `tenure._account.Limit`."""
        return self._account.counts(storage)

    def _before(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> list[_Geometry]:
        """Enter what is there before an operation, and note what it may enlarge."""
        existing = storages_in(args)
        if kwargs:
            existing += storages_in(kwargs)
        # its argument is new, unless the memory is another library's
        if func in _LIFTS:
            existing = [storage for storage in existing if not storage.resizable()]
        places = _geometries(func, args, kwargs)
        # set_ is the one operation that is given storages as such
        if places:
            existing += self._held(args)
        self._account.note_existing(existing)
        return places

    def _held(self, args: tuple[Any, ...]) -> list[UntypedStorage]:
        """Return the storages, passed as such, that tensors lie in; the other ones are new.

        Copying, loading and receiving a tensor makes a storage without an operation, then a tensor
        with ``set_``. Foreign modes above this one make a new storage look held.
        """
        storages = [value for value in args if isinstance(value, UntypedStorage)]
        n_above = self._n_above()
        return [each for each in storages if is_in_a_tensor(each, args[0].is_inference(), n_above)]

    def _n_above(self) -> int:
        """Return how many budgets this thread opened later; their modes are called first."""
        modes = [mode for mode in self._stream.modes if isinstance(mode, CountingMode)]
        return len(modes) - 1 - modes.index(self)

    def _exceeds(self) -> bool:
        if self._account.live_bytes <= self._limit_bytes:
            return False
        # Storages that became smaller without an operation are seen only now: nobody is refused for
        # memory that has gone.
        self._account.measure_again()
        return self._account.live_bytes > self._limit_bytes

    def _refuse(self, what: Any, requested_bytes: int) -> NoReturn:
        live_bytes = self.live_bytes
        # a copy's storage, which is made before any operation, goes with the error
        if live_bytes > self._limit_bytes:
            live_bytes -= requested_bytes
        free_bytes = self._limit_bytes - live_bytes
        text = (
            f"{self._device} out of memory. Tried to allocate {_exactly(requested_bytes)} in "
            f"{what}. memory_budget has a limit of {_exactly(self._limit_bytes)} on "
            f"{self._device} of which {_exactly(free_bytes)} is free; {_exactly(live_bytes)} is in "
            "use by what was made in its block. Make less at a time, free tensors, or raise "
            "the limit."
        )
        for watcher in tuple(refusal_watchers):
            watcher(text)
        raise torch.OutOfMemoryError(text)


def counting_on(device: str) -> list[CountingMode]:
    """Return the counting modes of this thread on ``device``, or on all of its type."""
    return [
        mode
        for mode in this_stream().modes
        if isinstance(mode, CountingMode)
        if not mode.closed and device in (str(mode._device), mode._device.type)
    ]


def _pop_closed(stacked: list[Any]) -> None:
    """Take closed modes off the stack; one below a mode that is open has to wait for that."""
    while stacked and getattr(stacked[-1], "closed", False) and open_modes()[-1:] == stacked[-1:]:
        stacked.pop().__exit__(None, None, None)


def _exactly(n_bytes: int) -> str:
    short, exact = format_bytes(n_bytes), f"{n_bytes} bytes"
    return f"{short} ({exact})"


_Geometry = tuple[Any, UntypedStorage, int, int, torch.Size, tuple[int, ...]]
"""A tensor, its storage and the bytes of that, and where its elements lie: offset, shape, stride.

It holds the storage, so it is kept for one call only.
"""


def _geometries(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[_Geometry]:
    """Return the indices of arguments that ``func`` may enlarge; mostly none."""
    names, positions = _enlarged_arguments(func)
    if not names:
        return []
    chosen = [args[i] for i in positions if i < len(args)]
    chosen += [kwargs[name] for name in names if name in kwargs]
    tensors = passed_tensors(chosen)
    return [_geometry_of(tensor) for tensor in tensors if tensor.layout is torch.strided]


def _restore(places: Iterable[_Geometry]) -> None:
    """Undo what a refused operation did to the places of its arguments; the elements stay."""
    with without_dispatch():
        for tensor, storage, n_bytes, *geometry in places:
            tensor.set_(storage, *geometry)
            # never made larger: what has become smaller meanwhile was the operation's own doing
            if storage.nbytes() > n_bytes:
                storage.resize_(n_bytes)


# once for each operator: this stands in the way of every operation of a budget
@functools.cache
def _enlarged_arguments(func: Any) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Names and positions of the ``out=`` arguments, or of the tensor that is resized."""
    schema = schema_of(func)
    # a higher-order operator
    if schema is None:
        return (), ()
    resizes = func.overloadpacket in _RESIZERS
    found = [
        (argument.name, position)
        for position, argument in enumerate(schema.arguments)
        if argument.is_out or (resizes and position == 0)
    ]
    return tuple(name for name, _ in found), tuple(position for _, position in found)


def _geometry_of(tensor: Tensor) -> _Geometry:
    storage, offset = tensor.untyped_storage(), int(tensor.storage_offset())
    return tensor, storage, storage.nbytes(), offset, tensor.shape, tensor.stride()
