"""What is left of a disposed tensor: a handle without storage that refuses every use, loudly.

Only looking at it is quiet: ``repr``, ``str``, ``format``, ``dir`` and ``hash`` never raise.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor

from tenure._callers import Site, package_of
from tenure._containers import passed_tensors
from tenure._errors import DisposedAttributeError, DisposedTensorError
from tenure._heap import Holder, find_holders
from tenure._text import describe, operation_of
from tenure._torch.compiler import is_dynamo_compiling, never_compiled

RECORD = "_tenure_record"
"""Where in its ``__dict__`` a disposed handle says what it was."""
_HOLDER = "_tenure_holder"
# of the kinds of holders those that a user has stored something in; the rest is on its way
_LASTING = frozenset({"attribute", "container", "global", "closure", "default", "partial", "cache"})
_ADVICE = (
    "Keep it with move_to_outer() or detach_from_scope(), make it inside persist() if it is a "
    "cache, or use it inside."
)
_ADVICE_ON_HOLDER = (
    "still holds it: store detach_from_scope(...) there, or make it inside persist(), if it is to "
    "outlive the block."
)


@dataclass(frozen=True, slots=True)
class Cause:
    """What disposed a tensor; one object serves all tensors that went together.

    Attributes:
        scope: the scope that owned them, as ``<DisposeScope 'step'>``; None if none did.
        opened: where that scope was opened.
        call: the function that disposed them, or None if it was the end of the scope.
        at: where it was called.
        advice: what to do instead, where the usual advice would be wrong.
    """

    scope: str | None
    opened: Site | None = None
    call: str | None = None
    at: Site | None = None
    advice: str | None = None

    def __str__(self) -> str:
        owner = f"{self.scope} (opened at {self.opened})" if self.scope else ""
        if self.call is None:
            return f"disposed when {owner} closed"
        return f"disposed by {self.call}() at {self.at}" + (
            f" while {owner} owned it" if owner else ""
        )


Record = tuple[torch.dtype, tuple[int, ...], torch.device, Site | None, Cause]
"""What a handle was, where it was made, and what disposed it; made text when somebody asks."""
# a function in C in torch 2.15, which is in no frame
_APPLY: CodeType | None = getattr(torch.autograd.Function.apply, "__code__", None)
# C++ asks this of what forward() of a Function returned, and an exception there ends the process:
# the handle goes on to the caller, whose first use of it is refused
_ASKED_OF_RESULTS: dict[str, Callable[[Record], object]] = {
    "sym_size": lambda record: record[1],
    "device": lambda record: record[2],
    "layout": lambda record: torch.strided,
}


class DisposedTensor(Tensor):
    """The class of a handle whose tensor has been let go. Users never make one."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> NoReturn:
        """Refuse every function and every property of torch."""
        _refuse(operation_of(func), (args, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as a function of none
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Refuse what reaches the kernel without passing ``__torch_function__``."""
        operation: str = func.overloadpacket.__name__
        if operation in _ASKED_OF_RESULTS and sys._getframe(1).f_code is _APPLY:
            record: Record | None = notes_on(args[0]).get(RECORD)
            if record is not None:
                return _ASKED_OF_RESULTS[operation](record)
        _refuse(f"{operation}()", (args, kwargs))

    def __getattr__(self, name: str) -> NoReturn:
        error: type[AttributeError] = (
            AttributeError if name.startswith("_") else DisposedAttributeError
        )
        raise error(f".{name} of {_text_of(self)}. {_own_advice_on(self) or _ADVICE}")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # untyped
        return f"<DisposedTensor {_text_of(self)}>"

    def __format__(self, spec: str) -> str:
        # a spec such as .3f is for the number that is gone
        return repr(self)

    def __dir__(self) -> list[str]:
        return ["__class__"]


def notes_on(tensor: Tensor) -> dict[str, Any]:
    """Return the attributes of a disposed handle, among them its `RECORD`."""
    notes: dict[str, Any] = object.__getattribute__(tensor, "__dict__")
    return notes


@never_compiled
def refuse(tensor: Tensor, operation: str) -> NoReturn:
    """Raise the error that names ``operation`` and what ``tensor`` was.

    Raises:
        DisposedTensorError: always.
    """
    raise DisposedTensorError(f"{operation} got {_text_of(tensor)}. {_advice_on(tensor)}")


def _advice_on(tensor: Tensor) -> str:
    own_advice = _own_advice_on(tensor)
    # it can't trace a search of the heap
    if is_dynamo_compiling():
        return own_advice or _ADVICE
    holder = _holder_of(tensor)
    if own_advice:
        return f"{holder} still holds it. {own_advice}" if holder else own_advice
    return f"{holder} {_ADVICE_ON_HOLDER}" if holder else _ADVICE


def _own_advice_on(tensor: Tensor) -> str | None:
    record: Record | None = notes_on(tensor).get(RECORD)
    return None if record is None else record[4].advice


def _holder_of(tensor: Tensor) -> str:
    notes = notes_on(tensor)
    # a program that asks again and again must not search each time
    if _HOLDER not in notes:
        notes[_HOLDER] = _found_holder_of(tensor)
    holder: str = notes[_HOLDER]
    return holder


def _found_holder_of(tensor: Tensor) -> str:
    """Return the name of a handle's holder beside variables of running functions, or ""."""
    # what goes wrong here must not hide the error that is coming
    with suppress(Exception):
        (holders,) = find_holders([tensor])
        passing = _variables_of_torch()
        for holder in sorted(holders, key=_is_variable_of_a_module):
            if not holder.running and holder.kind in _LASTING:
                # who holds the holder is no news to whoever wrote its attribute
                chain = holder.chain.partition(", held by ")[0]
                if not chain.startswith(passing):
                    return chain
    return ""


def _is_variable_of_a_module(holder: Holder) -> bool:
    """Return whether a step of a script may bind it anew; a list keeps what it has."""
    return holder.kind == "global" and "[" not in holder.chain


def _variables_of_torch() -> tuple[str, ...]:
    """Return the first steps of chains through the lists in which torch passes arguments."""
    names: set[str] = set()
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if package_of(frame) == "torch":
            names.add(f"{frame.f_code.co_qualname}.<locals>.")
        frame = frame.f_back
    return tuple(names)


def _refuse(operation: str, trees: tuple[object, ...]) -> NoReturn:
    for tensor in passed_tensors(trees):
        if type(tensor) is DisposedTensor:
            refuse(tensor, operation)
    raise DisposedTensorError(f"{operation} got a disposed tensor. {_ADVICE}")


def _text_of(tensor: Tensor) -> str:
    record: Record | None = notes_on(tensor).get(RECORD)
    if record is None:
        return "tensor"
    dtype, shape, device, created, cause = record
    # those of nested tensors are symbols
    known = all(type(size) is int for size in shape)
    n_bytes = math.prod(shape) * dtype.itemsize if known else 0
    origin = f"; it was created at {created}" if created else ""
    return f"{describe(dtype, shape, device, n_bytes)}, {cause}{origin}"
