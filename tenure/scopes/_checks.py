"""What scopes refuse, and in which words: every check speaks before anything has changed."""

from __future__ import annotations

from threading import current_thread, get_ident
from typing import TYPE_CHECKING, NoReturn

from torch import Tensor

from tenure._callers import warn_user
from tenure._errors import ScopeUsageError, ScopeUsageWarning
from tenure._text import describe_tensor

from ._thread import foreign_owner_of

if TYPE_CHECKING:
    from ._block import Block

_ONE_BLOCK = "A scope is neither reusable nor reentrant: make a new one with NewDisposeScope()."
_ONE_THREAD = (
    "A scope is used on the thread that opened it: hand a tensor over with detach_from_scope() "
    "there and attach_to_scope() here."
)


def refuse_second_entry(scope: Block) -> NoReturn:
    """Say that a scope is for one block.

    Raises:
        ScopeUsageError: always.
    """
    raise ScopeUsageError(f"{scope!r} was entered a second time. {_ONE_BLOCK}")


def refuse_copy(scope: Block) -> NoReturn:
    """Say that a scope can't be doubled.

    Raises:
        ScopeUsageError: always.
    """
    raise ScopeUsageError(
        f"{scope!r} can't be copied or pickled, because a tensor has one owner. {_ONE_BLOCK}"
    )


def refuse_positional(options: tuple[object, ...]) -> NoReturn:
    """Say that all but the name of a scope is passed by keyword.

    Raises:
        ScopeUsageError: always.
    """
    raise ScopeUsageError(
        f"NewDisposeScope() got {options[0]!r} beside its name, and no scope was made. All else is "
        f"passed by keyword: write policy={options[0]!r}, or on_error= or capture=."
    )


def refuse_stuck(tensor: Tensor) -> NoReturn:
    """Say that the class of a tensor allows no disposal.

    Raises:
        ScopeUsageError: always.
    """
    raise ScopeUsageError(
        f"dispose() got a {type(tensor).__name__}, whose class has __slots__ and no "
        "__tensor_flatten__ that works, so its handle can't be emptied. It stays alive; all other "
        "tensors of the call were disposed. Delete the references to it instead."
    )


def warn_of_graph(tensor: Tensor) -> None:
    """Say that a tensor stays because a CUDA graph will hand it out again."""
    warn_user(
        f"dispose() left {describe_tensor(tensor)} as it is: a CUDA graph of torch.compile hands "
        'this very tensor out at each replay (mode="reduce-overhead"), and its memory goes with '
        "the graph. Clone it to have one that can be disposed.",
        ScopeUsageWarning,
    )


def check_name(name: object) -> None:
    """Make sure that a scope is called by a text.

    Raises:
        ScopeUsageError: it is not.
    """
    if not isinstance(name, str):
        raise ScopeUsageError(
            f"NewDisposeScope() got a {type(name).__name__} as its name, and no scope was made. "
            "Pass a text or nothing: a scope sees by itself what its block makes."
        )


def check_open(scope: Block, call: str) -> None:
    """Make sure that ``scope`` is open and used on its own thread.

    Raises:
        ScopeUsageError: it is not.
    """
    if not scope.is_open:
        raise ScopeUsageError(
            f"{call}() was called on {scope!r}. Use a scope inside its with block. {_ONE_BLOCK}"
        )
    check_thread(scope, call)


def check_thread(scope: Block, call: str) -> None:
    """Make sure that ``scope`` is used on the thread that opened it.

    Raises:
        ScopeUsageError: it is not.
    """
    if scope._threads.thread_id != get_ident():
        raise ScopeUsageError(
            f"{call}() was called on {scope!r} from thread {current_thread().name!r}. "
            f"Nothing was changed. {_ONE_THREAD}"
        )


def check_target(scope: Block | None) -> None:
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
