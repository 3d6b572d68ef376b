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

from tenure._devices import Elsewhere, is_here
from tenure._errors import CommandError
from tenure._torch.fakes import building, new_mode

_ACCELERATORS = ("cuda", "xpu", "mps", "hpu", "mtia")
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
        elsewhere = Elsewhere(_is_missing, torch.device("cpu"), keeps_names=False)
        with building(new_mode()), elsewhere:
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


def _is_missing(kind: str) -> bool:
    # tensors of meta don't mix with those of a batch
    return kind == "meta" or (kind in _ACCELERATORS and not is_here(kind))
