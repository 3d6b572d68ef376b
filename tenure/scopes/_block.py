"""A block of the user's program that a scope watches: opening, suspending and closing it.

Invariants: a block is used on the thread that opened it and is neither reusable nor reentrant;
closing unlinks first and settles second, so that nothing that goes wrong with one tensor leaves the
thread in a half-open state.
"""

from __future__ import annotations

import sys
from threading import get_ident
from types import CodeType, FrameType, TracebackType
from typing import Any, Literal, Never, NoReturn, Self, get_args

from tenure._callers import CONTEXTLIB, Capture, Site, opening_site, user_frame
from tenure._text import counted
from tenure._torch.compiler import is_dynamo_compiling, never_compiled
from tenure._torch.modes import remove

from ._checks import (
    check_choice,
    check_name,
    check_open,
    check_thread,
    refuse_copy,
    refuse_positional,
    refuse_second_entry,
)
from ._closing import settle
from ._generators import SUSPENDABLE, warn_in_generator
from ._leaks import LeakReport
from ._ledger import Ledger, n_alive, take_all
from ._thread import ThreadScopes, World, this_thread
from ._tracker import Manager, current

Policy = Literal["dispose", "report", "raise"]
OnError = Literal["dispose", "keep"]
_Status = Literal["not yet open", "open", "suspended", "closed"]

_POLICIES = get_args(Policy)
_ON_ERROR = get_args(OnError)
_CAPTURES = (None, *get_args(Capture))
_DISPOSE: Policy = "dispose"
_NEW: _Status = "not yet open"
_OPEN: _Status = "open"
_SUSPENDED: _Status = "suspended"
_CLOSED: _Status = "closed"


class Block:
    """The life of a scope; what it owns and hands on is DisposeScope's part."""

    # fmt: off
    __slots__ = (
        "__weakref__", "_gate", "_ledger", "_opener", "_outer", "_status", "_threads", "_world",
        "capture", "leaks", "name", "on_error", "policy",
    )
    # fmt: on

    capture: Capture | None
    _gate: Manager | None  # the manager that may write to the ledger without asking further
    _opener: tuple[CodeType, int, int]  # code, instruction and identity of the frame of the block
    _ledger: Ledger
    _outer: Self | None
    _threads: ThreadScopes
    _world: World | None  # the stretch of the mode stack that it counts in while it is open

    def __init__(
        self,
        name: str | None = None,
        *options: Never,
        policy: Policy = "dispose",
        on_error: OnError = "dispose",
        capture: Capture | None = None,
    ) -> None:
        if options:
            refuse_positional(options)
        if name is not None and type(name) is not str:
            check_name(name)
        if not (policy is on_error is _DISPOSE and capture is None):  # by far the most
            check_choice("policy", policy, _POLICIES)
            check_choice("on_error", on_error, _ON_ERROR)
            check_choice("capture", capture, _CAPTURES)
            capture = capture if policy == "dispose" or capture else "site"
        self.name = name
        self.policy = policy
        self.on_error = on_error
        self.capture = capture
        self.leaks: LeakReport | None = None
        self._status = _NEW

    @never_compiled
    def __enter__(self) -> Self:
        """Open the scope on this thread, inside the scope that is current."""
        if is_dynamo_compiling():  # inside compiled code a scope is transparent
            return self
        frame = sys._getframe(1)
        code = self._open(frame)
        if code.co_flags & SUSPENDABLE:
            try:
                warn_in_generator(frame, self)
            except BaseException:  # where warnings are errors no __exit__ follows
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
        if self._status is not _OPEN:  # closed early, or transparent inside compiled code
            return
        if self._threads.thread_id != get_ident():
            check_thread(self, "close")
        try:
            self._suspend()
            self._finish(exc)
        except BaseException:  # as in _resume
            self._unlink()
            raise

    @never_compiled
    def close(self) -> None:
        """End the scope now; the end of its block, or a second call, then does nothing.

        Raises:
            ScopeUsageError: it belongs to another thread, or was never opened.
            ScopeLeakError: the policy is ``"raise"`` and tensors outlived it.
        """
        if self._status is not _CLOSED:
            check_open(self, "close")
            self.__exit__(None, None, None)

    def _open(self, frame: FrameType) -> CodeType:
        """Begin to own tensors, in a block of the user's program that ``frame`` runs."""
        if self._status is not _NEW:
            refuse_second_entry(self)
        self._threads = this_thread()
        self._ledger = {}
        self._world = self._outer = None
        if frame.f_globals is CONTEXTLIB:  # an ExitStack opens it on behalf of a user
            frame = user_frame(frame)
        code = frame.f_code
        self._opener = code, frame.f_lasti, id(frame)
        self._resume()
        return code

    def _resume(self) -> None:
        """Become the current scope, inside the one that is current now."""
        threads = self._threads
        try:
            if threads.deferred.waiting:
                threads.deferred.run()
            outer: Any = current.get()
            # by far the most are opened in none, or in one that is open right here
            if outer is not None and not (outer._status is _OPEN and outer._threads is threads):
                outer = threads.manager.open_scope(outer)
            self._outer = outer
            self._gate = None if self.capture else threads.manager
            self._world = threads.enter_world()
            self._status = _OPEN
            threads.open[id(self)] = self
            current.set(self)
        except BaseException:  # Ctrl-C or the recursion limit: no __exit__ will follow
            self._unlink()
            raise

    def _suspend(self) -> None:
        """Give way to the scope around; what is made from now on is not this scope's."""
        self._gate = None
        self._status = _SUSPENDED
        world, self._world = self._world, None
        assert world is not None
        world.n_scopes -= 1
        if current.get() is self:
            outer = self._outer
            current.set(outer if outer is None or outer._status is _OPEN else self.outer)
        if world.n_scopes == 0:  # not in a deeper call: recursion may be near its limit
            threads = self._threads
            remove(threads.manager)
            if threads.world is world:
                threads.world = world.outer

    def _unlink(self) -> None:
        """Finish what an exception interrupted: nothing of this scope stays on the thread."""
        self._gate = None
        self._status = _CLOSED
        world, self._world = self._world, None
        if world is not None:
            world.n_scopes -= 1
        threads = self._threads
        threads.open.pop(id(self), None)
        if current.get() is self:
            current.set(self._outer)
        if threads.world is not None and threads.world.n_scopes == 0:
            remove(threads.manager)
            threads.world = threads.world.outer

    def _finish(self, exc: BaseException | None) -> None:
        """End a suspended scope."""
        threads = self._threads
        threads.open.pop(id(self), None)
        self._status = _CLOSED
        if self._ledger or self.policy != "dispose":
            settle(self, take_all(self._ledger), exc)
        if threads.deferred.waiting:
            threads.deferred.run()

    # --- its state

    @property
    def is_open(self) -> bool:
        """Whether it takes tensors: its block runs, and is no generator suspended at a yield."""
        return self._status is _OPEN

    @property
    def closed(self) -> bool:
        """Whether its block has ended."""
        return self._status is _CLOSED

    @property
    def outer(self) -> Self | None:
        """The nearest scope around this one that is still open."""
        scope = self._outer if self._status is not _NEW else None
        while scope is not None and not scope.is_open:
            scope = scope._outer
        return scope

    @property
    def _owns_tensors(self) -> bool:
        return self._status is _OPEN or self._status is _SUSPENDED

    # --- how it speaks of itself

    @property
    def site(self) -> Site:
        """Where its block was opened."""
        return opening_site(*self._opener)

    @property
    def label(self) -> str:
        """Its name as errors print it: ``<DisposeScope 'step'>``."""
        return f"<DisposeScope {self.name!r}>" if self.name else "<DisposeScope>"

    def __repr__(self) -> str:
        if self._status is _NEW:
            return f"{self.label[:-1]} {_NEW}>"
        owned = f", {counted(n_alive(self._ledger), 'tensor')}" if self._owns_tensors else ""
        return f"{self.label[:-1]} {self._status}{owned}, opened at {self.site}>"

    def __reduce__(self) -> NoReturn:
        refuse_copy(self)
