"""The scope itself: which tensors it owns, how it hands them on, and how it lets them go.

Invariant: a tensor has one owner at the most, and every verb either does all it says or raises with
every owner unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from torch import Tensor

from tenure._callers import user_site
from tenure._errors import ScopeUsageError
from tenure._storages import total_bytes
from tenure._torch.compiler import is_dynamo_compiling, never_compiled

from ._block import Block
from ._disposal import disposable, dispose_all, is_disposed
from ._disposed import Cause, refuse
from ._owner import alive, enter, owns, take
from ._thread import check_not_foreign, check_open, check_thread, this_thread
from ._tracker import current
from ._trees import Tree, given_back, required_tensors


class DisposeScope(Block):
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

    __slots__ = ()

    # --- what it owns

    @property
    def live_bytes(self) -> int:
        """The bytes of the storages of the tensors that it owns, shared ones once."""
        return total_bytes(self.owned())

    def owned(self) -> list[Tensor]:
        """The tensors that it owns, in no particular order; none once it has closed."""
        if not self._owns_tensors:
            return []
        check_thread(self, "owned")
        return alive(self._ledger)

    def __len__(self) -> int:
        return len(self.owned())

    def __bool__(self) -> bool:
        # a scope that owns nothing is still a scope
        return True

    def __contains__(self, tensor: object) -> bool:
        if not self._owns_tensors:
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
    """The innermost open scope of this thread (of this task, under asyncio), or None."""
    scope = current.get()
    if scope is None:
        return None
    return cast("DisposeScope | None", this_thread().tracker.open_scope(scope))


def checked_target(value: object) -> DisposeScope | None:
    """The target of a move: an open scope of this thread, or None.

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
