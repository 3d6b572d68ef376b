"""The work that a function of the user's program returns: made without data where that is possible.

Invariant: nothing is made on a device. A device that is not here is taken to be the CPU, as what is
on the CPU is taken to be on the device that is asked about.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from tenure._errors import CommandError
from tenure._torch.fakes import building, new_mode

_ADVICE = "Return (fn, batch) or (fn, batch, optimizer), where fn takes the batch."


class Work(NamedTuple):
    """A step.

    Attributes:
        fn: gives the loss of a batch.
        batch: what it is given.
        optimizer: steps at the end; or None.
    """

    fn: Callable[[Any], Any]
    batch: Any
    optimizer: Optimizer | None = None


def made_by(make: Callable[[], Any], name: str) -> Work:
    """Call a function on tensors without data; where it fails on these, call it as it is.

    Args:
        make: returns the parts of the work.
        name: what it is called in errors.

    Raises:
        CommandError: it returns something else.
    """
    try:
        with building(new_mode()), _Elsewhere():
            made = make()
    except Exception as error:
        # as text: the error keeps alive what was made so far
        told = in_a_line(error)
    else:
        return _checked(made, name)
    note = f"{name} fails on tensors without data ({told}): now it runs as it is, in memory."
    print(note, file=sys.stderr)
    return _checked(make(), name)


def in_a_line(error: BaseException) -> str:
    """The type and the first line of an error."""
    first = str(error).partition("\n")[0].rstrip(".")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _checked(made: Any, name: str) -> Work:
    if isinstance(made, tuple) and len(made) in (2, 3) and callable(made[0]):
        work = Work(*made)
        if work.optimizer is None or isinstance(work.optimizer, Optimizer):
            return work
    shown = _kind(made)
    if isinstance(made, tuple):
        shown = f"({', '.join(map(_kind, made))})"
    raise CommandError(f"{name} returned {shown}. {_ADVICE}")


def _kind(value: object) -> str:
    # not what the class of one without data is called
    return "Tensor" if isinstance(value, Tensor) else type(value).__name__


class _Elsewhere(TorchFunctionMode):
    """Takes ``meta`` and devices that this machine lacks for the CPU.

    torch would look for a driver; and tensors of ``meta`` don't mix with those of a batch.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Tensor.cuda() and its like
        if args and isinstance(args[0], Tensor) and _is_elsewhere(getattr(func, "__name__", "")):
            return args[0]
        named = {key: _here(value) for key, value in (kwargs or {}).items()}
        return func(*map(_here, args), **named)


def _here(value: Any) -> Any:
    if isinstance(value, torch.device) and _is_elsewhere(value.type):
        return torch.device("cpu")
    if isinstance(value, str) and _is_elsewhere(value.partition(":")[0]):
        return "cpu"
    return value


def _is_elsewhere(kind: str) -> bool:
    if kind == "meta":
        return True
    if kind not in ("cuda", "xpu", "mps", "hpu", "mtia"):
        return False
    module = getattr(torch, kind, None)
    return module is None or not module.is_available()
