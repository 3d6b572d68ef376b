"""The scope itself: it owns tensors weakly, and lets go of the survivors when its block ends.

Invariants: a tensor has one owner at the most; a scope is used on the thread that opened it and is
neither reusable nor reentrant; leaving it unlinks first and disposes second, so that nothing that
goes wrong with one tensor leaves the thread in a half-open state.
"""

from __future__ import annotations

import sys
from threading import current_thread, get_ident
from types import CodeType, FrameType, TracebackType
from typing import Literal, NoReturn, Self, get_args

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from tenure._errors import ScopeUsageError

from ._closing import dispose_all, settle
from ._disposal import is_disposed
from ._disposed import Cause, refuse
from ._generators import SUSPENDABLE, warn_in_generator
from ._leaks import LeakReport
from ._ledger import Ledger
from ._manager import Manager, current
from ._sites import CONTEXTLIB, Capture, Site, user_frame, user_site
from ._storages import storage_bytes
from ._thread import ThreadScopes, World, foreign_owner_of, this_thread
from ._trees import Tree, given_back, required_tensors

Policy = Literal["dispose", "report", "raise"]
OnError = Literal["dispose", "keep"]
_Status = Literal["not yet open", "open", "suspended", "closed"]

_POLICIES = get_args(Policy)
_ON_ERROR = get_args(OnError)
_CAPTURES = (None, *get_args(Capture))
_NEW: _Status = "not yet open"
_OPEN: _Status = "open"
_SUSPENDED: _Status = "suspended"
_CLOSED: _Status = "closed"
_ONE_BLOCK = (
    "A scope is neither reusable nor reentrant: make a new one with NewDisposeScope() for each "
    "block."
)
_ONE_THREAD = (
    "A scope is used on the thread that opened it: hand a tensor over with detach_from_scope() "
    "there and attach_to_scope() here."
)


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
        >>> from tenure import NewDisposeScope
        >>> kept = []
        >>> with NewDisposeScope("step") as scope:
        ...     kept.append(torch.ones(2, 3))
        ...     total = scope.move_to_outer(kept[0].sum())
        >>> total.item()
        6.0
        >>> kept[0]  # doctest: +ELLIPSIS
        <DisposedTensor float32[2, 3] on cpu, 24 B, disposed when <DisposeScope 'step'> ... closed>

    Source: TorchSharp's DisposeScope, https://github.com/dotnet/TorchSharp.
    """

    # fmt: off
    __slots__ = (
        "__weakref__", "_gate", "_ledger", "_opener", "_outer", "_status", "_threads", "_world",
        "capture", "leaks", "name", "on_error", "policy",
    )
    # fmt: on

    capture: Capture | None
    _gate: Manager | None  # the manager that may write to the ledger without asking further
    _opener: tuple[CodeType, int, int]  # code, instruction and identity of the frame of the block
    _outer: DisposeScope | None
    _threads: ThreadScopes
    _world: World

    def __init__(
        self,
        name: str | None = None,
        *,
        policy: Policy = "dispose",
        on_error: OnError = "dispose",
        capture: Capture | None = None,
    ) -> None:
        if not (policy == on_error == "dispose" and capture is None):
            _check_choice("policy", policy, _POLICIES)
            _check_choice("on_error", on_error, _ON_ERROR)
            _check_choice("capture", capture, _CAPTURES)
            capture = capture if policy == "dispose" or capture else "site"
        self.name = name
        self.policy = policy
        self.on_error = on_error
        self.capture = capture
        self.leaks: LeakReport | None = None
        self._status = _NEW

    # --- its block

    def __enter__(self) -> Self:
        """Open the scope on this thread, inside the scope that is current."""
        if is_dynamo_compiling():  # inside compiled code a scope is transparent
            return self
        frame = sys._getframe(1)
        code = self._open(frame)
        if code.co_flags & SUSPENDABLE:
            warn_in_generator(frame, self)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the scope; an exception of the block goes on unmasked."""
        if self._status is _OPEN:  # inside compiled code it never was
            self._close(exc)

    def close(self) -> None:
        """End the scope now; the end of its block, or a second call, then does nothing.

        Raises:
            ScopeUsageError: it belongs to another thread, or was never opened.
            ScopeLeakError: the policy is ``"raise"`` and tensors outlived it.
        """
        if self._status is not _CLOSED:
            self._check("close")
            self._close(None)

    def _open(self, frame: FrameType) -> CodeType:
        """Begin to own tensors, in a block of the user's program that ``frame`` runs."""
        if self._status is not _NEW:
            raise ScopeUsageError(f"{self!r} was entered a second time. {_ONE_BLOCK}")
        self._threads = threads = this_thread()
        self._ledger = Ledger()
        if frame.f_globals is CONTEXTLIB:  # an ExitStack opens it on behalf of a user
            frame = user_frame(frame)
        code = frame.f_code
        self._opener = code, frame.f_lasti, id(frame)
        threads.open[id(self)] = self
        self._resume()
        return code

    def _resume(self) -> None:
        """Become the current scope, inside the one that is current now."""
        threads = self._threads
        if threads.deferred.waiting:
            threads.deferred.run()
        scope = current.get()
        self._outer = None if scope is None else threads.manager.open_scope(scope)
        self._gate = None if self.capture else threads.manager
        self._world = threads.enter_world()
        self._status = _OPEN
        current.set(self)

    def _suspend(self) -> None:
        """Give way to the scope around; what is made from now on is not this scope's."""
        self._gate = None
        self._status = _SUSPENDED
        if current.get() is self:
            outer = self._outer
            current.set(outer if outer is None or outer._status is _OPEN else self.outer)
        self._threads.leave_world(self._world)

    def _close(self, exc: BaseException | None) -> None:
        if self._threads.thread_id != get_ident():
            self._check_thread("close")
        self._suspend()
        self._finish(exc)

    def _finish(self, exc: BaseException | None) -> None:
        """End a suspended scope."""
        threads = self._threads
        threads.open.pop(id(self), None)
        self._status = _CLOSED
        if self._ledger or self.policy != "dispose":
            settle(self, self._ledger.take_all(), exc)
        if threads.deferred.waiting:
            threads.deferred.run()

    # --- what it owns

    @property
    def is_open(self) -> bool:
        """Whether it takes tensors: its block runs, and is no generator suspended at a yield."""
        return self._status is _OPEN

    @property
    def closed(self) -> bool:
        """Whether its block has ended."""
        return self._status is _CLOSED

    @property
    def outer(self) -> DisposeScope | None:
        """The nearest scope around this one that is still open."""
        scope = self._outer if self._status is not _NEW else None
        while scope is not None and not scope.is_open:
            scope = scope._outer
        return scope

    @property
    def live_bytes(self) -> int:
        """The bytes of the storages of the tensors that it owns, shared ones once."""
        return storage_bytes(self.owned())

    def owned(self) -> list[Tensor]:
        """The tensors that it owns, in no particular order; none once it has closed."""
        self._check_thread("owned")
        return self._ledger.alive() if self._owns_tensors else []

    def __len__(self) -> int:
        return len(self.owned())

    def __bool__(self) -> bool:
        return True  # a scope that owns nothing is still a scope

    def __contains__(self, tensor: object) -> bool:
        self._check_thread("__contains__")
        return self._owns_tensors and self._ledger.owns(tensor)

    @property
    def _owns_tensors(self) -> bool:
        return self._status is _OPEN or self._status is _SUSPENDED

    # --- handing tensors on

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
        if not is_dynamo_compiling():
            self._check("move_to_outer")
            self._move(required_tensors(trees, "move_to_outer()"), self.outer)
        return given_back(trees)

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
        if not is_dynamo_compiling():
            self._check("move_to")
            check_target(scope)
            self._move(required_tensors(trees, "move_to()"), scope)
        return given_back(trees)

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
        if not is_dynamo_compiling():
            self._check("detach")
            self._move(required_tensors(trees, "detach()"), None)
        return given_back(trees)

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
        if not is_dynamo_compiling():
            self._check("attach")
            self._attach(required_tensors(trees, "attach()"))
        return given_back(trees)

    def _move(self, tensors: list[Tensor], target: DisposeScope | None) -> None:
        for tensor in tensors:
            reference = self._ledger.take(tensor)
            if reference is None:
                continue
            if target is None:
                self._threads.hand_out(reference)
            else:
                target._ledger.add(reference)

    def _attach(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if is_disposed(tensor):
                refuse(tensor, "attach()")
            check_not_foreign(tensor, "attach()")
        for tensor in tensors:
            owner = self._threads.owner_of(tensor)
            if owner is None:
                self._threads.adopt(tensor, self._ledger)
            elif owner is not self:
                owner._move([tensor], self)

    # --- letting go

    def dispose_everything(self) -> None:
        """Dispose all tensors that it owns now; the scope stays open.

        Raises:
            ScopeUsageError: this scope is closed, or belongs to another thread.
        """
        if not is_dynamo_compiling():
            self._check("dispose_everything")
            self._dispose_but([], "dispose_everything")

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
            self._check("dispose_everything_but")
            kept = required_tensors(keep, "dispose_everything_but()") if keep else []
            self._dispose_but(kept, "dispose_everything_but")
        return given_back(keep)

    def _dispose_but(self, kept: list[Tensor], call: str) -> None:
        spared = set(map(id, kept))
        condemned = [
            (tensor, reference)
            for tensor in self._ledger.alive()
            if id(tensor) not in spared and (reference := self._ledger.take(tensor)) is not None
        ]
        dispose_all(self, condemned, Cause(self.label, self.site, call, user_site()))

    # --- how it speaks of itself

    @property
    def site(self) -> Site:
        """Where its block was opened."""
        code, instruction, _ = self._opener
        return Site(code, instruction)

    @property
    def label(self) -> str:
        """Its name as errors print it: ``<DisposeScope 'step'>``."""
        return f"<DisposeScope {self.name!r}>" if self.name else "<DisposeScope>"

    def __repr__(self) -> str:
        if self._status is _NEW:
            return f"{self.label[:-1]} {_NEW}>"
        n_owned = self._ledger.n_alive() if self._owns_tensors else 0
        owned = f", {n_owned} tensor{'' if n_owned == 1 else 's'}" if self._owns_tensors else ""
        return f"{self.label[:-1]} {self._status}{owned}, opened at {self.site}>"

    def __reduce__(self) -> NoReturn:
        raise ScopeUsageError(
            f"{self!r} can't be copied or pickled, because a tensor has one owner. {_ONE_BLOCK}"
        )

    # --- what it refuses

    def _check(self, call: str) -> None:
        if self._status is not _OPEN:
            raise ScopeUsageError(
                f"{call}() was called on {self!r}. Use a scope inside its with block. {_ONE_BLOCK}"
            )
        self._check_thread(call)

    def _check_thread(self, call: str) -> None:
        if self._owns_tensors and get_ident() != self._threads.thread_id:
            raise ScopeUsageError(
                f"{call}() was called on {self!r} from thread {current_thread().name!r}. "
                f"Nothing was changed. {_ONE_THREAD}"
            )


NewDisposeScope = DisposeScope
"""TorchSharp's name for opening a scope: ``with NewDisposeScope("step") as scope:``."""


def current_scope() -> DisposeScope | None:
    """The innermost open scope of this thread (of this task, under asyncio), or None."""
    scope = current.get()
    return None if scope is None else this_thread().manager.open_scope(scope)


def check_target(scope: object) -> None:
    """Make sure that tensors can move to ``scope``.

    Raises:
        ScopeUsageError: it is no scope, is closed, or belongs to another thread.
    """
    if scope is None:
        return
    if not isinstance(scope, DisposeScope):
        raise ScopeUsageError(
            f"move_to() wants the DisposeScope to move to first, and got {type(scope).__name__}. "
            "Write move_to(scope, tensors)."
        )
    if not scope.is_open:
        raise ScopeUsageError(
            f"move_to() would hand tensors to {scope!r}, which owns nothing. Nothing was moved. "
            "Move them to a scope that is open."
        )
    scope._check_thread("move_to")


def check_not_foreign(tensor: Tensor, call: str) -> None:
    """Make sure that no scope of another thread owns ``tensor``.

    Raises:
        ScopeUsageError: one does.
    """
    owner = foreign_owner_of(tensor)
    if owner is not None:
        raise ScopeUsageError(f"{call} got a tensor of {owner!r}, of another thread. {_ONE_THREAD}")


def _check_choice(argument: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise ScopeUsageError(
            f"{argument}={value!r} is not one of {', '.join(map(repr, choices))}."
        )
