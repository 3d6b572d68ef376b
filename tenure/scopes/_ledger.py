"""A ledger of the tensors that a scope owns, weakly.

A tensor's key is the address of its handle: a dead handle's entry is overwritten by the next tensor
made at its address, so a million temporaries leave a handful of entries instead of a million.
"""

from __future__ import annotations

import weakref
from types import CodeType
from typing import Literal

from torch import Tensor

Reference = weakref.ref[Tensor]
Ledger = dict[int, Reference]
"""From the address of a handle to the reference; the hot path of the library writes it itself."""
Opener = tuple[CodeType, int, int]
"""Code, instruction and identity of the frame that opened a scope; it holds no frame."""
Status = Literal["not yet open", "open", "closed"]

# compared by identity, as the hot paths do
NEW: Status = "not yet open"
OPEN: Status = "open"
CLOSED: Status = "closed"


def owns(ledger: Ledger, tensor: object) -> bool:
    """Return whether this very handle is in ``ledger``."""
    # the entry may be of a dead handle that had this address before
    reference = ledger.get(id(tensor))
    return reference is not None and reference() is tensor


def alive(ledger: Ledger) -> list[Tensor]:
    """Return the tensors of ``ledger`` that are alive."""
    # here and below of a copy: the collector may run and let torch write to the ledger meanwhile
    return [tensor for reference in ledger.copy().values() if (tensor := reference()) is not None]


def n_alive(ledger: Ledger) -> int:
    """Return how many tensors of ``ledger`` are alive."""
    return sum(reference() is not None for reference in ledger.copy().values())


def enter(ledger: Ledger, reference: Reference) -> None:
    """Add a tensor that is alive."""
    ledger[id(reference())] = reference


def take(ledger: Ledger, tensor: Tensor) -> Reference | None:
    """Remove a tensor and return its reference; None if it is not in ``ledger``."""
    return ledger.pop(id(tensor)) if owns(ledger, tensor) else None


def take_all(ledger: Ledger) -> list[tuple[Tensor, Reference]]:
    """Empty ``ledger``, and return what is still alive."""
    references = list(ledger.values())
    ledger.clear()
    return [(tensor, ref) for ref in references if (tensor := ref()) is not None]


def prune(ledger: Ledger) -> None:
    """Forget the dead."""
    for key in [key for key, reference in ledger.items() if reference() is None]:
        del ledger[key]
