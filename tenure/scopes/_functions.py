"""The verbs of a scope as functions, for code that has a tensor at hand and no scope."""

from __future__ import annotations

from weakref import ref

from torch import Tensor

from tenure._callers import user_site, warn_user
from tenure._errors import ScopeUsageError, ScopeUsageWarning
from tenure._text import describe_tensor
from tenure._torch.compiler import belongs_to_graph, is_dynamo_compiling, never_compiled

from ._disposal import dispose_all, inside_operation, is_disposed
from ._disposed import Cause
from ._ledger import take
from ._scope import DisposeScope, checked_target, current_scope
from ._thread import check_not_foreign, this_thread
from ._trees import Tree, given_back, required_tensors


def owner_of(tensor: Tensor) -> DisposeScope | None:
    """Return the open scope of this thread that owns ``tensor``, or None.

    Args:
        tensor: a tensor of any shape, dtype and device.
    """
    return this_thread().owner_of(tensor)


@never_compiled
def move_to_outer(*trees: Tree) -> Tree:
    """Hand tensors of the current scope to the scope around it; with none around, detach them.

    Args:
        *trees: tensors of any shape, dtype and device, or nested containers of them.

    Returns:
        The same object (a tuple if several were given).

    Raises:
        ScopeUsageError: a tree holds no tensor.

    Source: ``MoveToOuterDisposeScope`` of TorchSharp. There "outer" is seen from the owner; here
    from the current scope, so a tensor that was only passed through stays where it is.
    """
    if not is_dynamo_compiling():
        if (scope := current_scope()) is not None:
            return scope.move_to_outer(*trees)
        required_tensors(trees, "move_to_outer()")
    return given_back(trees)


@never_compiled
def move_to(scope: DisposeScope | None, *trees: Tree) -> Tree:
    """Make ``scope`` the owner of tensors, whichever scope of this thread owns them now.

    Args:
        scope: an open scope of this thread; None detaches.
        *trees: tensors of any shape, dtype and device, or nested containers of them.

    Returns:
        The same object (a tuple if several were given).

    Raises:
        DisposedTensorError: one of them has been disposed. No tensor changed its owner.
        ScopeUsageError: ``scope`` is closed or belongs to another thread, or a tree holds no
            tensor.

    Source: ``MoveToOtherDisposeScope`` of TorchSharp; a tensor without an owner is attached.
    """
    if not is_dynamo_compiling():
        if (target := checked_target(scope)) is not None:
            return target._attach(trees, "move_to")
        _detach(trees, "move_to")
    return given_back(trees)


@never_compiled
def detach_from_scope(*trees: Tree) -> Tree:
    """Take tensors out of the care of their scopes: they live as in plain PyTorch.

    Args:
        *trees: tensors of any shape, dtype and device, or nested containers of them.

    Returns:
        The same object (a tuple if several were given).

    Raises:
        ScopeUsageError: a scope of another thread owns one of them, or a tree holds no tensor. No
            tensor changed its owner.

    Source: ``DetachFromDisposeScope`` of TorchSharp.
    """
    if not is_dynamo_compiling():
        _detach(trees, "detach_from_scope")
    return given_back(trees)


@never_compiled
def attach_to_scope(*trees: Tree) -> Tree:
    """Make the current scope the owner of tensors, whoever owned them before.

    Args:
        *trees: tensors of any shape, dtype and device, or nested containers of them.

    Returns:
        The same object (a tuple if several were given).

    Raises:
        DisposedTensorError: one of them has been disposed. No tensor changed its owner.
        ScopeUsageError: no scope is open here, or a tensor is owned by another thread's scope, or a
            tree holds no tensor.
    """
    if is_dynamo_compiling():
        return given_back(trees)
    if (scope := current_scope()) is None:
        required_tensors(trees, "attach_to_scope()")
        raise ScopeUsageError(
            "attach_to_scope() was called where no scope is open. Nothing was attached. "
            "Call it inside `with NewDisposeScope():`, or use attach() of a scope."
        )
    return scope._attach(trees, "attach_to_scope")


@never_compiled
def dispose(*trees: Tree) -> Tree:
    """Let tensors go now, whether a scope of this thread owns them or none; twice is harmless.

    Autograd, views and other handles keep the data they need.

    Args:
        *trees: tensors of any shape, dtype and device, or nested containers of them.

    Returns:
        The same object (a tuple if several were given), whose tensors refuse every use. Only a
        tensor that a CUDA graph hands out again at each replay stays as it is, with a warning.

    Raises:
        ScopeUsageError: a scope of another thread owns one of them, or a tree holds no tensor:
            nothing was disposed. Or the class of one allows no disposal: all others were.

    Source: ``Dispose`` of TorchSharp's tensors.
    """
    if not is_dynamo_compiling():
        _dispose(required_tensors(trees, "dispose()"))
    return given_back(trees)


def _detach(trees: tuple[object, ...], call: str) -> None:
    tensors = required_tensors(trees, f"{call}()")
    check_not_foreign(tensors, call)
    this_thread().release(tensors)


def _dispose(tensors: list[Tensor]) -> None:
    check_not_foreign(tensors, "dispose")
    of_graphs = [tensor for tensor in tensors if belongs_to_graph(tensor)]
    if of_graphs:
        warn_user(
            f"dispose() left {describe_tensor(of_graphs[0])} as it is: a CUDA graph of "
            "torch.compile hands this very tensor out at each replay "
            '(mode="reduce-overhead"), and its memory goes with the graph. Clone it to have one '
            "that can be disposed.",
            ScopeUsageWarning,
        )
        tensors = [tensor for tensor in tensors if not belongs_to_graph(tensor)]
    thread, site = this_thread(), user_site()
    for tensor in tensors:
        if (owner := thread.owner_of(tensor)) is None:
            reference = take(thread.handed_out, tensor) or ref(tensor)
            dispose_all([(tensor, reference)], Cause(None, None, "dispose", site), thread, None)
        else:
            cause = Cause(owner.label, owner.site, "dispose", site)
            owned = [(tensor, owner._ledger.pop(id(tensor)))]
            dispose_all(owned, cause, thread, owner._opener)
    stuck = [tensor for tensor in tensors if not is_disposed(tensor)]
    if stuck and not inside_operation(None):
        raise ScopeUsageError(
            f"dispose() got a {type(stuck[0]).__name__}, whose class has __slots__ and no "
            "__tensor_flatten__ that works, so its handle can't be emptied. It stays alive; all "
            "other tensors of the call were disposed. Delete the references to it instead."
        )
