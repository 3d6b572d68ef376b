"""What scopes refuse, and in which words: every check speaks before anything has changed."""

from __future__ import annotations

from threading import current_thread

from torch import Tensor

from tenure._errors import ScopeUsageError

from ._owner import Owner
from ._thread import foreign_owner_of, this_thread

ONE_BLOCK = "A scope is neither reusable nor reentrant: make a new one with NewDisposeScope()."
_ONE_THREAD = (
    "A scope is used on the thread that opened it: hand a tensor over with detach_from_scope() "
    "there and attach_to_scope() here."
)


def check_open(scope: Owner, call: str) -> None:
    """Make sure that ``scope`` is open and used on its own thread.

    Raises:
        ScopeUsageError: it is not.
    """
    if not scope.is_open:
        raise ScopeUsageError(
            f"{call}() was called on {scope!r}. Use a scope inside its with block. {ONE_BLOCK}"
        )
    check_thread(scope, call)


def check_thread(scope: Owner, call: str) -> None:
    """Make sure that ``scope`` is used on the thread that opened it.

    Raises:
        ScopeUsageError: it is not.
    """
    if scope._tracker is not this_thread().tracker:
        raise ScopeUsageError(
            f"{call}() was called on {scope!r} from thread {current_thread().name!r}. "
            f"Nothing was changed. {_ONE_THREAD}"
        )


def check_target(scope: Owner | None) -> None:
    """Make sure that tensors can move to ``scope``; to None they always can.

    Raises:
        ScopeUsageError: it is closed, or belongs to another thread.
    """
    if scope is None:
        return
    if not scope.is_open:
        raise ScopeUsageError(
            f"move_to() would hand tensors to {scope!r}, which owns nothing. Nothing was moved. "
            "Move them to a scope that is open."
        )
    check_thread(scope, "move_to")


def check_not_foreign(tensor: Tensor, call: str) -> None:
    """Make sure that no scope of another thread owns ``tensor``.

    Raises:
        ScopeUsageError: one does.
    """
    owner = foreign_owner_of(tensor)
    if owner is not None:
        raise ScopeUsageError(f"{call} got a tensor of {owner!r}, of another thread. {_ONE_THREAD}")


def check_choice(argument: str, value: object, choices: tuple[object, ...]) -> None:
    """Make sure that an option has one of its values.

    Raises:
        ScopeUsageError: it has another.
    """
    known = isinstance(value, str | None) and value in choices  # an array compares as an array
    if not known:
        raise ScopeUsageError(
            f"{argument}={value!r} is not one of {', '.join(map(repr, choices))}."
        )
