"""The one routine by which every entry point runs work that may run out of memory.

Invariant: when work is tried again, every tensor that the failed attempt made is let go, and the
state that it changed is what it was. On the way without an error nothing is collected, emptied or
inspected.

While a graph is captured nothing is tried again: noting and undoing state, waiting for the device
and giving memory back would each break the capture, and hide that memory ran out.

Leaving ``except`` frees what an exception holds only if nobody kept it; clearing its frames frees
that whoever did, without the garbage collector. Only frames that have ended are cleared: clearing a
generator that is suspended closes it, and one of the caller's would silently give no more items.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn, Protocol, TypeVar

from tenure._errors import OutOfRetriesError
from tenure._graph_capture import accelerator_is_capturing
from tenure._oom import OomInfo, chain_of, free_bytes_in, limit_bytes_in, oom_of_work
from tenure._registries import handles_ooms, retry_watchers
from tenure._text import counted, format_bytes
from tenure._torch.compiler import never_compiled
from tenure.scopes import DisposeScope

from .._interrupts import Interrupts
from .._undo import Caches, Rollback
from ._events import AdaptiveEvent, EventKind, OnRetry, memory_of, tell, this_thread
from ._relief import Relief, free_bytes_of, pieces_in, unused_bytes_at

T = TypeVar("T")
TAKEN_BACK = (
    "The attempt that made it was taken back. What the function appends to a list outside is of "
    "every attempt: return it instead, beside the loss with has_aux=True of step(), or as a result "
    "with collect= of chunked() and range()."
)
"""The advice about a tensor that an attempt has put where it outlives it."""


_LEAK = (
    " {} has worked here before: if sizes shrink from call to call, something keeps memory, and "
    "tenure.NewDisposeScope(policy='report') around a call names it."
)


class SizeSearch(Protocol):
    """Which size to try next; local to one call of an entry point."""

    @property
    def size(self) -> int:
        """The size to try now."""
        ...

    @property
    def limited_by(self) -> str:
        """The arguments that allow no smaller size than this one, as errors name them."""
        ...

    def succeeded(self) -> int | None:
        """Work of this size returned; the size before, where none as large had worked yet."""

    def shrink(self, info: OomInfo) -> bool:
        """Work of this size ran out of memory: make it smaller; False where no size is left."""
        ...

    def gave_up(self) -> int:
        """Give up: no allowed size fits; return the largest that worked before, or 0."""
        ...


@dataclass(frozen=True, slots=True)
class _Failure:
    """An attempt that ran out of memory; `error` is kept until it has been released."""

    error: BaseException
    info: OomInfo
    unused_bytes: int | None


class Attempts:
    """Runs pieces of work, each again until it fits; for one call of an entry point.

    Args:
        name: what errors and events call the work.
        scope: an open scope that is this call's own. After each success the tensors that it owns
            move to the scope around it, after each failure they are disposed.
        unit: what the sizes count.
        state: what else an attempt changes, and how that is undone.
        on_retry: called with each AdaptiveEvent.
        advice: what errors say where not even 1 fits; None: that memory has to be made.
        starts_empty: whether each attempt begins with an empty cache of the device, so that one
            that failed is not tried again for what the cache holds.

    Attributes:
        advice: as it was passed; the work may replace it as it goes on.
        n_begun: how many attempts there were.
    """

    __slots__ = (
        "_collects", "_is_noted", "_name", "_on_retry", "_outside", "_scope", "_starts_empty",
        "_state", "_statistics", "_unit", "advice", "n_begun",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        scope: DisposeScope,
        *,
        unit: str = "size",
        state: Rollback | None = None,
        on_retry: OnRetry | None = None,
        advice: str | None = None,
        starts_empty: bool = False,
    ) -> None:
        self._name = name
        self._starts_empty = starts_empty
        self.advice = advice
        self._scope = scope
        self._unit = unit
        self._state = state
        # False also when memory runs out while the state is noted: there is nothing to undo then,
        # and what was noted in part has been brought back by begin() itself
        self._is_noted = False
        self._statistics = this_thread.statistics
        self._on_retry = on_retry
        # The interpreter makes what the caller is handling the context of what is raised here. It
        # is none of the attempts', and its frames are the caller's.
        self._outside = sys.exception()
        # whether the collector was on before a failure, and has to be again after it
        self._collects = False
        self.n_begun = 0

    @never_compiled
    def run(self, search: SizeSearch, work: Callable[[int], T]) -> T:
        """Return ``work(search.size)``, tried until it fits.

        Args:
            search: gives the sizes; what it learns from this piece is used for the next.
            work: the piece of work, a function of the size; has to be one that can run again.

        Raises:
            OutOfRetriesError: no size is left. All tensors of the last attempt are let go.
        """
        sizes: list[int] = []
        relief: Relief | None = None
        try:
            outcome = self._attempt(work, search.size)
            while isinstance(outcome, _Failure):
                relief = relief or Relief(cache_is_empty=self._starts_empty)
                sizes.append(search.size)
                self._let_go(outcome, search.size)
                if not self._prepare_next(outcome, search, relief):
                    # the traceback of the failure leads back to this frame: a cycle, if held here
                    last = [outcome]
                    del outcome
                    self._give_up(last, sizes, search.limited_by, search.gave_up())
                # nothing of the failed attempt is there when the next one begins: the bytes that it
                # kept would be missing there
                forget_traceback(outcome.error, self._outside)
                del outcome
                self._collect_again()
                outcome = self._attempt(work, search.size)
        except BaseException:
            # An interrupt may come between an attempt that failed and the end of its undoing.
            self._collect_again()
            self._undo()
            raise
        size = search.size
        before = search.succeeded()
        if before is not None:
            self._tell("grow", before, size, None)
        return outcome

    def _attempt(self, work: Callable[[int], T], size: int) -> T | _Failure:
        """Run the work once; its result, or what is to know of its failure."""
        self._statistics.attempts += 1
        self.n_begun += 1
        state = self._state
        # A state that is noted or set synchronizes with the device, which breaks a capture.
        if state is not None and accelerator_is_capturing():
            state = None
        # who explains errors of memory is told that this is none
        token = handles_ooms.set(True)
        try:
            if state is not None:
                state.begin()
                self._is_noted = True
            result = work(size)
            if state is not None:
                # an interrupt finds all changes made, or none
                with Interrupts():
                    state.finish()
                    self._is_noted = False
        except BaseException as error:
            # Within the block only what needs the moment of the error: all else would run with the
            # error as its context, and while the frames below still hold the memory.
            # No automatic collection may run before the relief, because nobody would count the
            # bytes that it frees.
            self._collects = gc.isenabled()
            gc.disable()
            info = oom_of_work(error, self._outside)
            if info is None or not info.retry_safe or accelerator_is_capturing():
                self._leave()
                raise
            return _Failure(error, info, unused_bytes_at(info))
        finally:
            handles_ooms.reset(token)
        self._hand_on()
        return result

    def _collect_again(self) -> None:
        if self._collects:
            self._collects = False
            gc.enable()

    def _leave(self) -> None:
        """Undo what was changed and hand on what was made, because an error goes on.

        See Note [Retry and undo], rule 6.
        """
        try:
            self._undo()
        except Exception:
            if not accelerator_is_capturing():
                raise
            # Random state can't be set while a graph is captured. The error of the work says what
            # matters, and must not be replaced by that of undoing it.
            self._is_noted = False
        self._hand_on()

    def _hand_on(self) -> None:
        made = self._scope.owned()
        if made:
            self._scope.move_to_outer(made)

    def _let_go(self, failure: _Failure, size: int) -> None:
        """Free what the attempt made, whoever keeps its exception or its tensors."""
        self._statistics.ooms += 1
        for watcher in tuple(retry_watchers):
            watcher(failure.error)
        # The frames too, not the scope alone: their locals may be the last to hold what no scope
        # owns, such as the graph of a loss. See Note [Retry and undo], rule 4.
        release(failure.error, self._outside)
        self._dispose(f"attempt of {self._name} at {self._unit} {size}")
        self._undo()

    def _undo(self) -> None:
        """Undo what the attempt has changed, if that has not been done; again, if it was begun."""
        if self._state is not None and self._is_noted:
            self._state.undo()
            self._is_noted = False

    def take_back(self, caches: Caches) -> None:
        """Undo what the attempt that runs has changed so far, and let go of what it has made.

        Called by the work itself; state whose ``undo`` forgets it has to be noted again.

        Args:
            caches: those of the work, as they were: what was put into them is taken out, because
                the work will find them again.
        """
        if self._state is not None:
            self._state.undo()
        if made := self._scope.owned():
            caches.take_out(made)
            del made
        self._dispose(f"trial of {self._name}")

    def _dispose(self, name: str) -> None:
        """Dispose what the scope owns; errors about it then say that it is of ``name``."""
        scope = self._scope
        own_name, scope.name = scope.name, name
        scope.dispose_everything(advice=TAKEN_BACK)
        scope.name = own_name

    def _prepare_next(self, failure: _Failure, search: SizeSearch, relief: Relief) -> bool:
        """Make room for the same size, or go to a smaller one; False where neither is left."""
        info, size = failure.info, search.size
        freed_bytes = relief.make_room(info, failure.unused_bytes)
        if not freed_bytes and search.shrink(info):
            # or it would never end
            assert search.size < size
            self._tell("shrink", size, search.size, info)
            return True
        freed_bytes = freed_bytes or relief.last_resort(info)
        if freed_bytes:
            self._tell("retry", size, size, info, freed_bytes)
        return freed_bytes > 0

    def _tell(
        self,
        kind: EventKind,
        size: int,
        next_size: int | None,
        info: OomInfo | None,
        freed_bytes: int = 0,
    ) -> None:
        event = AdaptiveEvent(kind, self._name, self._unit, size, next_size, info, freed_bytes)
        tell(event, self._on_retry)

    def _give_up(
        self, last: list[_Failure], sizes: list[int], limited_by: str, worked: int
    ) -> NoReturn:
        failure = last.pop()
        info = failure.info
        self._tell("give_up", sizes[-1], None, info)
        facts = [f"{self._unit} {', '.join(map(str, sizes))}", *_bytes_of(info)]
        leak = _LEAK.format(f"{self._unit.capitalize()} {worked}") if worked else ""
        raise OutOfRetriesError(
            f"{counted(len(sizes), 'attempt')} of {self._name!r} ran out of "
            f"{memory_of(info)} ({'; '.join(facts)}). {pieces_in(info)}"
            f"{self._advice_for(sizes[-1], limited_by)}{leak}",
            tuple(sizes),
            info,
        ) from failure.error

    def _advice_for(self, size: int, limited_by: str) -> str:
        if size > 1:
            return f"Allow less than {size} with {limited_by}, or page the model."
        return self.advice or (
            "Not even 1 fits: free memory, make the model or the sample smaller, or page the model."
        )


def _bytes_of(info: OomInfo) -> list[str]:
    needed_bytes, free_bytes = info.requested_bytes, free_bytes_of(info)
    needed = [] if needed_bytes is None else [f"needed {format_bytes(needed_bytes)}"]
    free = [] if free_bytes is None else [f"free {format_bytes(free_bytes)}"]
    if needed_bytes is not None and free_bytes is not None and free_bytes >= needed_bytes:
        # what the attempt held is let go by now, and would fit as it is
        left_bytes, limit_bytes = free_bytes_in(info.text), limit_bytes_in(info.text)
        were_free = f"of {format_bytes(free_bytes)} that were free"
        if left_bytes is None or left_bytes >= free_bytes:
            return [f"{needed[0]} beside what it used {were_free}"]
        used = format_bytes(free_bytes - left_bytes)
        # the rest is taken by what was there before
        in_all = ""
        if limit_bytes is not None and limit_bytes > free_bytes:
            in_all = f", of {format_bytes(limit_bytes)} in all"
        return [f"the last used {used} {were_free}{in_all}, and {needed[0]} more"]
    return [", ".join(needed + free)] if needed or free else []


# The interpreter's own slot: a subclass may shadow the name, with a property that raises.
_TRACEBACK: Any = vars(BaseException)["__traceback__"]
_CAN_BE_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def release(error: BaseException, outside: BaseException | None) -> None:
    """Clear the frames of an exception, of those it came of, and of members of groups.

    Call it after the ``except`` block that caught ``error``. Its traceback still tells the lines,
    and the frames in it that have ended hold nothing.

    A suspended generator or coroutine in it belongs to whoever can still continue it. If those
    were only frames of the attempt, it ends when they are cleared, and is cleared after them. If
    somebody else holds it, it was there before the attempt or was handed out, and stays as it is.

    Args:
        error: what was caught.
        outside: the exception that was handled when the work began; it, and what it came of,
            belongs to the caller and is left as it is.
    """
    waiting = [frame for one in chain_of(error, outside) for frame in _frames_of(one)]
    n_before = -1
    # A frame that is cleared may have held the last reference to a generator, which ends with it
    # and can be cleared in the next round.
    while len(waiting) != n_before:
        n_before = len(waiting)
        waiting = [frame for frame in waiting if not _clear(frame)]


def forget_traceback(error: BaseException, outside: BaseException | None) -> None:
    """Detach the tracebacks too, which keep the frames of the callers once those have returned."""
    for one in chain_of(error, outside):
        BaseException.with_traceback(one, None)


def _frames_of(error: BaseException) -> Iterator[FrameType]:
    tb = _TRACEBACK.__get__(error)
    while tb is not None:
        yield tb.tb_frame
        tb = tb.tb_next


def _clear(frame: FrameType) -> bool:
    """Clear a frame that has ended; False for a generator or coroutine that has not."""
    if frame.f_code.co_flags & _CAN_BE_SUSPENDED and not _has_ended(frame):
        return False
    # A frame that still runs, a caller's, refuses to be cleared, and is not to be.
    with contextlib.suppress(RuntimeError):
        frame.clear()
    return True


def _has_ended(frame: FrameType) -> bool:
    """Return whether the frame of a generator or coroutine has ended.

    Until then its variables and its code belong to the generator. Then the frame object takes them
    over, if anything refers to it, and is the one that shows them to the garbage collector.

    Source: ``frame_traverse`` and ``take_ownership`` of CPython 3.11 to 3.14.
    """
    return any(referent is frame.f_code for referent in gc.get_referents(frame))
