"""The scope: opening and closing a block, which tensors it owns, and how it hands them on.

Invariants: a scope is used on the thread that opened it and is neither reusable nor reentrant; a
tensor has one owner at the most, and every verb either does all it says or raises with every owner
unchanged; closing unlinks first and settles second, so that nothing that goes wrong with one tensor
leaves the thread in a half-open state; nothing masks an exception of the user's block.
"""

from __future__ import annotations

import dis
import functools
import inspect
import logging
import sys
from collections.abc import Callable
from threading import get_ident
from types import CodeType, FrameType, TracebackType
from typing import Any, Literal, NoReturn, Self, get_args

from torch import Tensor

from tenure._callers import (
    CONTEXTLIB,
    Capture,
    Site,
    module_of,
    opening_site,
    user_frame,
    user_site,
    warn_user,
)
from tenure._errors import ScopeLeakError, ScopeUsageError, ScopeUsageWarning
from tenure._registries import leak_watchers, scope_watchers
from tenure._storages import total_bytes
from tenure._text import counted
from tenure._torch.compiler import is_dynamo_compiling, never_compiled
from tenure._torch.modes import remove

from ._disposal import Survivors, disposable, dispose_all, dispose_waiting, is_disposed, site_of
from ._disposed import Cause, refuse
from ._leaks import LeakReport, build_leak_report
from ._ledger import (
    CLOSED,
    NEW,
    OPEN,
    Ledger,
    Opener,
    Status,
    alive,
    enter,
    n_alive,
    owns,
    take,
    take_all,
)
from ._thread import (
    ONE_BLOCK,
    ThreadScopes,
    check_not_foreign,
    check_open,
    check_thread,
    this_thread,
)
from ._tracker import Tracker, World, current
from ._trees import Tree, given_back, required_tensors

Policy = Literal["dispose", "report", "raise"]
OnError = Literal["dispose", "keep"]

_CHOICES: dict[str, tuple[object, ...]] = {
    "policy": get_args(Policy),
    "on_error": get_args(OnError),
    "capture": (None, *get_args(Capture)),
}
_DISPOSE: Policy = "dispose"
# the flags of code objects whose frames can be suspended at a yield
_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
# what RESUME says of a yield, and of `yield from`; 3 is an await
_AFTER_YIELD = (1, 2)
# who runs context managers and fixtures written as generators, where an open scope is meant
_DRIVERS = ("contextlib", "_pytest", "pytest_asyncio")
_logger = logging.getLogger("tenure.scopes")


class DisposeScope:
    """A block whose tensors are let go when it ends.

    Args:
        name: what reports and errors call it.
        policy: what happens to tensors that outlive the block. ``"dispose"``: they are let go.
            ``"report"``: they live on without an owner, and a report of them is logged and kept in
            ``leaks``. ``"raise"``: as ``"report"``, then ScopeLeakError, unless the block failed.
        on_error: ``"keep"`` leaves the survivors of a block that failed alive, for a post-mortem.
        capture: whether to note where each tensor is made: ``"site"``, ``"stack"``, or None for
            the site when the policy reports and nothing when it does not.

    Attributes:
        leaks: the report of the tensors that outlived the block, once it has ended under a policy
            that reports; None otherwise.

    Raises:
        ScopeUsageError: an argument is none of these values.

    Example:
        >>> import torch
        >>> from tenure import NewDisposeScope, is_disposed
        >>> kept = []
        >>> with NewDisposeScope("step") as scope:
        ...     kept.append(torch.ones(2, 3))
        ...     total = scope.move_to_outer(kept[0].sum())
        >>> total.item()
        6.0
        >>> is_disposed(kept[0])
        True

    Source: TorchSharp's DisposeScope, https://github.com/dotnet/TorchSharp.
    """

    # fmt: off
    __slots__ = (
        "__weakref__", "_gate", "_ledger", "_opener", "_outer", "_status", "_thread", "_world",
        "capture", "leaks", "name", "on_error", "policy",
    )
    # fmt: on

    # The mode that may write to the ledger without asking further, so one comparison answers for
    # three: that of the scope's thread while it is open and notes no places; else None.
    _gate: Tracker | None
    # Weak references only: what a scope owns still dies with its last handle.
    _ledger: Ledger
    # Kept until it is read: to spell a place takes longer than to open a scope.
    _opener: Opener
    # The scope that was current here when this one opened or was resumed; it may close before.
    _outer: DisposeScope | None
    # Only ever one of the four of `Status`, the very objects.
    _status: Status
    # Of the thread that opened it, the only one that may use it; none before it is open.
    _thread: ThreadScopes
    # The stretch of the mode stack that counts it: while it is open, and at no other time, so that
    # whatever interrupts it is counted out just once.
    _world: World | None
    capture: Capture | None
    # Set as it closes, and only under a policy that reports.
    leaks: LeakReport | None
    name: str | None
    on_error: OnError
    policy: Policy

    def __init__(
        self,
        name: str | None = None,
        *,
        policy: Policy = "dispose",
        on_error: OnError = "dispose",
        capture: Capture | None = None,
    ) -> None:
        if name is not None and not isinstance(name, str):
            raise ScopeUsageError(
                f"NewDisposeScope() got a {type(name).__name__} as its name, and no scope was "
                "made. Pass a text or nothing: a scope sees by itself what its block makes."
            )
        # fast path: most scopes are opened with default arguments
        if not (policy is on_error is _DISPOSE and capture is None):
            for option, value in (("policy", policy), ("on_error", on_error), ("capture", capture)):
                choices = _CHOICES[option]
                # an array compares as an array
                if not (isinstance(value, str | None) and value in choices):
                    raise ScopeUsageError(
                        f"{option}={value!r} is not one of {', '.join(map(repr, choices))}."
                    )
            capture = capture if policy == "dispose" or capture else "site"
        self.name = name
        self.policy = policy
        self.on_error = on_error
        self.capture = capture
        self.leaks = None
        self._status = NEW

    @never_compiled
    def __enter__(self) -> Self:
        """Open the scope on this thread, inside the scope that is current."""
        # inside compiled code a scope is transparent
        if is_dynamo_compiling():
            return self
        frame = sys._getframe(1)
        # an ExitStack opens it on behalf of a user
        if frame.f_globals is CONTEXTLIB:
            frame = user_frame(frame)
        self._open(frame)
        if frame.f_code.co_flags & _SUSPENDABLE:
            try:
                _warn_in_generator(frame, self)
            # where warnings are errors no __exit__ follows
            except BaseException:
                self._leave()
                raise
        return self

    @never_compiled
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the scope; an exception of the block goes on unmasked."""
        # closed early, or transparent inside compiled code
        if self._status is not OPEN:
            # what could not be done in an operation that closed it
            if self._status is CLOSED and self._thread.thread_id == get_ident():
                self._thread.tracker.leave_world()
                if self._thread.waiting:
                    dispose_waiting(self._thread)
            return
        thread = self._thread
        try:
            if thread.thread_id != get_ident():
                check_thread(self, "close")
            self._leave()
            if self._ledger or self.policy != "dispose":
                self._settle(take_all(self._ledger), exc)
            if thread.waiting:
                dispose_waiting(thread)
            # once more: what it disposed was let go within it
            if scope_watchers:
                _tell_end(self)
        # as in _open
        except BaseException:
            if thread.thread_id == get_ident():
                self._leave()
            raise

    @never_compiled
    def close(self) -> None:
        """End the scope now; the end of its block, or a second call, then does nothing.

        Raises:
            ScopeUsageError: it belongs to another thread, or was never opened.
            ScopeLeakError: the policy is ``"raise"`` and tensors outlived it.
        """
        if self._status is not CLOSED:
            check_open(self, "close")
            self.__exit__(None, None, None)

    def _open(self, frame: FrameType) -> None:
        """Become the current scope, inside the one that is current now, for a block of a frame."""
        if self._status is not NEW:
            raise ScopeUsageError(f"{self!r} was entered a second time. {ONE_BLOCK}")
        self._thread = thread = this_thread()
        self._ledger = {}
        self._world = self._outer = None
        self._opener = frame.f_code, frame.f_lasti, id(frame)
        try:
            if thread.waiting:
                dispose_waiting(thread)
            tracker = thread.tracker
            outer = current.get()
            # by far the most are opened in none, or in one that is open right here
            if outer is not None and not (outer._status is OPEN and outer._thread is thread):
                outer = tracker.open_scope(outer)
            self._outer = outer
            self._gate = None if self.capture else tracker
            self._world = tracker.enter_world()
            self._status = OPEN
            thread.open[id(self)] = self
            current.set(self)
            if scope_watchers:
                _tell_beginning(self)
        # Ctrl-C or the recursion limit: no __exit__ will follow
        except BaseException:
            self._leave()
            raise

    def _leave(self) -> None:
        """Make the scope around the current one; what is made from now on is not this scope's.

        Called again after an interruption, it does the rest, and nothing of this scope stays on the
        thread: see Note [Lifetimes and the tracker], rule 7.
        """
        self._gate = None
        self._status = CLOSED
        thread, world = self._thread, self._world
        self._world = None
        if world is not None:
            world.n_scopes -= 1
        thread.open.pop(id(self), None)
        # a block that ends out of turn, as ExitStack or asyncio may have it, is not the current one
        if current.get() is self:
            outer = self._outer
            current.set(outer if outer is None or outer._status is OPEN else self.outer)
        # as in Tracker.leave_world(), which is one call deeper: recursion may be near its limit
        tracker = thread.tracker
        if tracker.world is not None and tracker.world.n_scopes == 0 and remove(tracker):
            tracker.world = tracker.world.outer
        # last: what interrupts it interrupts nothing else
        if scope_watchers:
            _tell_end(self)

    def _settle(self, survivors: Survivors, exc: BaseException | None) -> None:
        """Do with what is still alive what the policy says."""
        thread = self._thread
        # often all that a ledger lists has died by itself
        if survivors:
            # the same list, which a report ignores: once torch.compile evaluates the frames, that
            # of the caller holds its arguments as well
            survivors[:] = disposable(survivors, thread)
        # to close a generator is no failure of its block
        failed = exc is not None and not isinstance(exc, GeneratorExit)
        keeps = failed and self.on_error == "keep"
        if self.policy == "dispose" and not keeps:
            if survivors:
                dispose_all(survivors, Cause(self.label, self.site), thread, self._opener)
            return
        for _, reference in survivors:
            thread.hand_out(reference)
        if not keeps:
            self._report(survivors, masked=exc is not None)

    def _report(self, survivors: Survivors, *, masked: bool) -> None:
        found = [
            (tensor, None if (site := site_of(reference)) is None else str(site))
            for tensor, reference in survivors
        ]
        # our own lists of the tensors, which are no leaks
        ours = (survivors, *survivors)
        self.leaks = report = build_leak_report(found, scope=self.label, ignore=ours)
        if not report.records:
            return
        _logger.warning("%s", report)
        for told in leak_watchers:
            told(report)
        if self.policy == "raise" and not masked:
            raise ScopeLeakError(str(report), report)

    def __reduce__(self) -> NoReturn:
        raise ScopeUsageError(
            f"{self!r} can't be copied or pickled, because a tensor has one owner. {ONE_BLOCK}"
        )

    # --- how it is

    @property
    def is_open(self) -> bool:
        """Whether it takes tensors, as its block runs."""
        return self._status is OPEN

    @property
    def closed(self) -> bool:
        """Whether its block has ended."""
        return self._status is CLOSED

    @property
    def outer(self) -> DisposeScope | None:
        """The nearest scope around this one that is still open."""
        scope = self._outer if self._status is not NEW else None
        while scope is not None and scope._status is not OPEN:
            scope = scope._outer
        return scope

    @property
    def site(self) -> Site:
        """Where its block was opened."""
        return opening_site(*self._opener)

    @property
    def label(self) -> str:
        """Its name as errors print it, ``<DisposeScope 'step'>``."""
        return f"<DisposeScope {self.name!r}>" if self.name else "<DisposeScope>"

    def __repr__(self) -> str:
        if self._status is NEW:
            return f"{self.label[:-1]} {NEW}>"
        owned = f", {counted(n_alive(self._ledger), 'tensor')}" if self.is_open else ""
        return f"{self.label[:-1]} {self._status}{owned}, opened at {self.site}>"

    # --- what it owns

    @property
    def live_bytes(self) -> int:
        """The bytes of the storages of the tensors that it owns, shared ones once."""
        return total_bytes(self.owned())

    def owned(self) -> list[Tensor]:
        """Return the tensors that it owns, in no particular order; none once it has closed."""
        if self._status is not OPEN:
            return []
        check_thread(self, "owned")
        return alive(self._ledger)

    def __len__(self) -> int:
        return len(self.owned())

    def __bool__(self) -> bool:
        # a scope that owns nothing is still a scope
        return True

    def __contains__(self, tensor: object) -> bool:
        if not self.is_open:
            return False
        check_thread(self, "__contains__")
        return owns(self._ledger, tensor)

    # --- handing tensors on

    @never_compiled
    def move_to_outer(self, *trees: Tree) -> Tree:
        """Hand tensors of this scope to the scope around it; with none around, detach them.

        Args:
            *trees: tensors of any shape, dtype and device, or nested containers of them.

        Returns:
            The same object (a tuple if several were given).

        Raises:
            ScopeUsageError: this scope is closed, or belongs to another thread, or a tree holds no
                tensor.

        Source: ``MoveToOuter`` of TorchSharp's DisposeScope; a tensor that this scope does not own
        stays where it is.
        """
        return self._move(trees, "move_to_outer", lambda: self.outer)

    @never_compiled
    def move_to(self, scope: DisposeScope | None, *trees: Tree) -> Tree:
        """Hand tensors of this scope to another open one of this thread, or to none.

        Args:
            scope: the new owner; None detaches.
            *trees: tensors of any shape, dtype and device, or nested containers of them.

        Returns:
            The same object (a tuple if several were given).

        Raises:
            ScopeUsageError: either scope is closed or belongs to another thread, or a tree holds no
                tensor. Every tensor keeps its owner.

        Source: ``MoveToOther`` of TorchSharp's DisposeScope.
        """
        return self._move(trees, "move_to", lambda: checked_target(scope))

    @never_compiled
    def detach(self, *trees: Tree) -> Tree:
        """Take tensors of this scope out of the care of any scope: they live as in plain PyTorch.

        Args:
            *trees: tensors of any shape, dtype and device, or nested containers of them.

        Returns:
            The same object (a tuple if several were given).

        Raises:
            ScopeUsageError: this scope is closed, or belongs to another thread, or a tree holds no
                tensor.

        Source: ``Detach`` of TorchSharp's DisposeScope.
        """
        return self._move(trees, "detach", lambda: None)

    @never_compiled
    def attach(self, *trees: Tree) -> Tree:
        """Make this scope the owner of tensors, whoever owned them before.

        Args:
            *trees: tensors of any shape, dtype and device, or nested containers of them.

        Returns:
            The same object (a tuple if several were given).

        Raises:
            DisposedTensorError: one of them has been disposed. No tensor changed its owner.
            ScopeUsageError: this scope is closed, or belongs to another thread, or a tensor is
                owned by another thread's scope, or a tree holds no tensor.

        Source: ``Attach`` of TorchSharp's DisposeScope; a tensor that moves here from another scope
        is not counted as attached.
        """
        return self._attach(trees, "attach")

    def _move(
        self, trees: tuple[Tree, ...], call: str, target: Callable[[], DisposeScope | None]
    ) -> Tree:
        """Hand tensors of this scope to another; it is asked for outside of compiled code alone."""
        if not is_dynamo_compiling():
            check_open(self, call)
            self._hand(required_tensors(trees, f"{call}()"), target())
        return given_back(trees)

    def _hand(self, tensors: list[Tensor], target: DisposeScope | None) -> None:
        for tensor in tensors:
            reference = take(self._ledger, tensor)
            if reference is None:
                continue
            if target is None:
                self._thread.hand_out(reference)
            else:
                enter(target._ledger, reference)

    def _attach(self, trees: tuple[Tree, ...], call: str) -> Tree:
        if not is_dynamo_compiling():
            check_open(self, call)
            tensors = required_tensors(trees, f"{call}()")
            for tensor in tensors:
                if is_disposed(tensor):
                    refuse(tensor, f"{call}()")
            check_not_foreign(tensors, call)
            for tensor in tensors:
                owner = self._thread.owner_of(tensor)
                if owner is None:
                    reference = self._thread.adopt(tensor)
                else:
                    reference = owner._ledger.pop(id(tensor))
                enter(self._ledger, reference)
                self._thread.choose(reference)
        return given_back(trees)

    # --- letting go

    @never_compiled
    def dispose_everything(self, *, advice: str | None = None) -> None:
        """Dispose all tensors that it owns now; the scope stays open.

        Args:
            advice: what the error of who uses one of them says to do, in place of the usual.

        Raises:
            ScopeUsageError: this scope is closed, or belongs to another thread.
        """
        if not is_dynamo_compiling():
            check_open(self, "dispose_everything")
            self._dispose_but([], "dispose_everything", advice)

    @never_compiled
    def dispose_everything_but(self, *keep: Tree) -> Tree:
        """Dispose what it owns now, except ``keep``, which stays with whoever owns it.

        Args:
            *keep: tensors of any shape, dtype and device, or nested containers of them.

        Returns:
            The same object (a tuple if several were given).

        Raises:
            ScopeUsageError: this scope is closed, or belongs to another thread, or a tree holds no
                tensor. Nothing was disposed.

        Source: ``DisposeEverythingBut`` of TorchSharp's DisposeScope, which adopts foreign tensors.
        """
        if not is_dynamo_compiling():
            check_open(self, "dispose_everything_but")
            kept = required_tensors(keep, "dispose_everything_but()") if keep else []
            self._dispose_but(kept, "dispose_everything_but")
        return given_back(keep)

    def _dispose_but(self, kept: list[Tensor], call: str, advice: str | None = None) -> None:
        spared = set(map(id, kept))
        condemned = [
            (tensor, reference)
            for tensor in alive(self._ledger)
            if id(tensor) not in spared and (reference := take(self._ledger, tensor)) is not None
        ]
        condemned = disposable(condemned, self._thread)
        cause = Cause(self.label, self.site, call, user_site(), advice)
        dispose_all(condemned, cause, self._thread, self._opener)


NewDisposeScope = DisposeScope
"""TorchSharp's name for opening a scope: ``with NewDisposeScope("step") as scope:``."""


def current_scope() -> DisposeScope | None:
    """Return the innermost open scope of this thread (of this task, under asyncio), or None."""
    scope = current.get()
    if scope is None:
        return None
    return this_thread().tracker.open_scope(scope)


def checked_target(value: object) -> DisposeScope | None:
    """Return the target of a move: an open scope of this thread, or None.

    Raises:
        ScopeUsageError: it is something else, closed, or of another thread.
    """
    if value is None:
        return None
    if not isinstance(value, DisposeScope):
        raise ScopeUsageError(
            "move_to() wants the DisposeScope to move to first, and got "
            f"{type(value).__name__}. Write move_to(scope, tensors)."
        )
    if not value.is_open:
        raise ScopeUsageError(
            f"move_to() would hand tensors to {value!r}, which owns nothing. Nothing was moved. "
            "Move them to a scope that is open."
        )
    check_thread(value, "move_to")
    return value


def _tell_beginning(scope: DisposeScope) -> None:
    for watcher in tuple(scope_watchers):
        watcher.began(scope)


def _tell_end(scope: DisposeScope) -> None:
    for watcher in tuple(scope_watchers):
        watcher.ended(scope)


@functools.lru_cache
def _yields_inside(code: CodeType, offset: int) -> bool:
    """Return whether the ``with`` block that is entered at an offset has a yield, or may have."""
    bytecode: Any = dis.Bytecode(code)
    instructions = list(bytecode)
    if not any(each.offset == offset and each.opname == "BEFORE_WITH" for each in instructions):
        return True
    # An exception in the block goes to its exit, or to a handler whose exceptions do. A handler
    # stands after what it is of, from Python 3.12 on behind all else.
    parts = bytecode.exception_entries
    at_exit = next(part.target for part in parts if part.start > offset)
    own: list[Any] = []
    for part in reversed(parts):
        if part.target == at_exit or any(each.start <= part.target < each.end for each in own):
            own.append(part)
    return any(
        each.opname == "RESUME" and each.arg & 3 in _AFTER_YIELD
        for each in instructions
        if any(part.start <= each.offset < part.end for part in own)
    )


def _warn_in_generator(frame: FrameType, scope: DisposeScope) -> None:
    """Warn that ``frame``, in which ``scope`` was just opened, can be suspended with it.

    While it is, the scope stays current and takes what the consumer makes, which is seldom meant;
    in a context manager written as a generator it is.
    """
    driver = frame.f_back
    if driver is not None and module_of(driver).startswith(_DRIVERS):
        return
    if not _yields_inside(frame.f_code, frame.f_lasti):
        return
    warn_user(
        f"{scope!r} was opened inside the generator {frame.f_code.co_qualname}(); while that is "
        "suspended the scope stays current and owns what its consumer makes. End "
        "its block before each yield, or decorate the function that makes each item with @scoped.",
        ScopeUsageWarning,
    )
