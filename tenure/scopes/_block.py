"""A block of the user's program that a scope watches: opening, suspending and closing it.

Invariants: a block is used on the thread that opened it and is neither reusable nor reentrant;
closing unlinks first and settles second, so that nothing that goes wrong with one tensor leaves the
thread in a half-open state; nothing masks an exception of the user's block.
"""

from __future__ import annotations

import inspect
import logging
import sys
from threading import get_ident
from types import FrameType, TracebackType
from typing import Any, Literal, Never, NoReturn, Self, get_args

from tenure._callers import CONTEXTLIB, Capture, module_of, user_frame, warn_user
from tenure._errors import ScopeLeakError, ScopeUsageError, ScopeUsageWarning
from tenure._registries import leak_watchers, scope_watchers
from tenure._torch.compiler import is_dynamo_compiling, never_compiled
from tenure._torch.modes import remove

from ._disposal import Survivors, disposable, dispose_all, dispose_waiting, site_of
from ._disposed import Cause
from ._leaks import LeakReport, build_leak_report
from ._owner import CLOSED, NEW, OPEN, SUSPENDED, Owner, take_all
from ._thread import ONE_BLOCK, ThreadScopes, check_open, check_thread, this_thread
from ._tracker import World, current

Policy = Literal["dispose", "report", "raise"]
OnError = Literal["dispose", "keep"]

_POLICIES = get_args(Policy)
_ON_ERROR = get_args(OnError)
_CAPTURES = (None, *get_args(Capture))
_DISPOSE: Policy = "dispose"
# the flags of code objects whose frames can be suspended at a yield
_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
# who runs context managers and fixtures written as generators, where an open scope is meant
_DRIVERS = ("contextlib", "_pytest", "pytest_asyncio")
_logger = logging.getLogger("tenure.scopes")


class Block(Owner):
    """The life of a scope; what it owns and hands on is DisposeScope's part."""

    __slots__ = ("_thread", "_world", "leaks", "on_error", "policy")

    # Of the thread that opened it, for good; a block that is not yet open has none.
    _thread: ThreadScopes
    # The stretch of the mode stack that counts it: while it is open, and at no other time, so that
    # whatever interrupts it is counted out just once.
    _world: World | None
    # Set as it closes, and only under a policy that reports.
    leaks: LeakReport | None
    on_error: OnError
    policy: Policy

    def __init__(
        self,
        name: str | None = None,
        *options: Never,
        policy: Policy = "dispose",
        on_error: OnError = "dispose",
        capture: Capture | None = None,
    ) -> None:
        if options:
            raise ScopeUsageError(
                f"NewDisposeScope() got {options[0]!r} beside its name, and no scope was made. All "
                f"else is passed by keyword: write policy={options[0]!r}, or on_error= or capture=."
            )
        if name is not None and not isinstance(name, str):
            raise ScopeUsageError(
                f"NewDisposeScope() got a {type(name).__name__} as its name, and no scope was "
                "made. Pass a text or nothing: a scope sees by itself what its block makes."
            )
        # by far the most are opened with none of these, and an empty scope is the dearest of all
        if not (policy is on_error is _DISPOSE and capture is None):
            _check_choice("policy", policy, _POLICIES)
            _check_choice("on_error", on_error, _ON_ERROR)
            _check_choice("capture", capture, _CAPTURES)
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
            # (see test_a_warning_that_is_an_error_leaves_no_scope_open)
            except BaseException:
                self._unlink()
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
        status = self._status
        # closed early, or transparent inside compiled code
        if status is not OPEN and status is not SUSPENDED:
            # what could not be done in an operation that closed it
            if status is CLOSED and self._thread.thread_id == get_ident():
                self._thread.tracker.leave_world()
                if self._thread.waiting:
                    dispose_waiting(self._thread)
            return
        thread = self._thread
        try:
            # the end of a generator, on whichever thread, finds its scope suspended
            if status is OPEN:
                if thread.thread_id != get_ident():
                    check_thread(self, "close")
                self._suspend()
            thread.open.pop(id(self), None)
            self._status = CLOSED
            if self._ledger or self.policy != "dispose":
                self._settle(take_all(self._ledger), exc)
            if thread.waiting:
                dispose_waiting(thread)
            # once more: what it disposed was let go within it
            if scope_watchers:
                _tell_end(self)
        # as in _open (see test_an_interrupt_while_closing_leaves_no_scope_open)
        except BaseException:
            if thread.thread_id == get_ident():
                self._unlink()
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

    def _open(self, frame: FrameType | None) -> None:
        """Become the current scope, inside the one that is current now.

        Args:
            frame: what runs the block that begins; None for a generator that goes on.
        """
        if frame is not None:
            if self._status is not NEW:
                raise ScopeUsageError(f"{self!r} was entered a second time. {ONE_BLOCK}")
            self._thread = thread = this_thread()
            self._ledger = {}
            self._world = self._outer = None
            self._opener = frame.f_code, frame.f_lasti, id(frame)
            self._tracker = thread.tracker
        thread = self._thread
        try:
            if thread.waiting:
                dispose_waiting(thread)
            tracker = thread.tracker
            outer: Any = current.get()
            # by far the most are opened in none, or in one that is open right here
            if outer is not None and not (outer._status is OPEN and outer._tracker is tracker):
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
        # (see test_the_recursion_limit_leaves_no_scope_open)
        except BaseException:
            self._unlink()
            raise

    def _suspend(self) -> None:
        """Give way to the scope around; what is made from now on is not this scope's."""
        self._gate = None
        self._status = SUSPENDED
        if scope_watchers:
            _tell_end(self)
        world, self._world = self._world, None
        assert world is not None
        world.n_scopes -= 1
        # a block that ends out of turn, as ExitStack or asyncio may have it, is not the current one
        if current.get() is self:
            outer = self._outer
            current.set(outer if outer is None or outer._status is OPEN else self.outer)
        # last: recursion may be near its limit, and _unlink ends what that interrupts
        if world.n_scopes == 0:
            self._thread.tracker.leave_world()

    def _unlink(self) -> None:
        """Finish what an exception interrupted: nothing of this scope stays on the thread."""
        self._gate = None
        self._status = CLOSED
        world, self._world = self._world, None
        if world is not None:
            world.n_scopes -= 1
        thread, tracker = self._thread, self._thread.tracker
        thread.open.pop(id(self), None)
        if current.get() is self:
            current.set(self._outer)
        # also a world that was entered and not yet counted in
        if tracker.world is not None and tracker.world.n_scopes == 0:
            remove(tracker)
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


def _tell_beginning(scope: Block) -> None:
    for watcher in tuple(scope_watchers):
        watcher.began(scope)


def _tell_end(scope: Block) -> None:
    for watcher in tuple(scope_watchers):
        watcher.ended(scope)


def _warn_in_generator(frame: FrameType, scope: Block) -> None:
    """Warn that ``frame``, in which ``scope`` was just opened, can be suspended with it.

    While it is, the scope stays current and takes what the consumer makes, which is seldom meant;
    in a context manager written as a generator it is.
    """
    driver = frame.f_back
    if driver is not None and module_of(driver).startswith(_DRIVERS):
        return
    warn_user(
        f"{scope!r} was opened inside the generator {frame.f_code.co_qualname}(); while that is "
        "suspended the scope stays current and owns what its consumer makes. Decorate the "
        "generator with @scoped, which suspends its scope at each yield, or close it before.",
        ScopeUsageWarning,
    )


def _check_choice(argument: str, value: object, choices: tuple[object, ...]) -> None:
    """Make sure that an option has one of its values.

    Raises:
        ScopeUsageError: it has another.
    """
    # an array compares as an array
    known = isinstance(value, str | None) and value in choices
    if not known:
        raise ScopeUsageError(
            f"{argument}={value!r} is not one of {', '.join(map(repr, choices))}."
        )
