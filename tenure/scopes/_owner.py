"""An owner of tensors: what it owns, weakly, and whether it takes more.

All that stands below the scopes, such as the mode that sees tensors being made, knows a scope as no
more than this. A tensor's key in a ledger is the address of its handle: a dead handle's entry is
overwritten by the next tensor made at its address, so a million temporaries leave a handful of
entries instead of a million.
"""

from __future__ import annotations

import weakref
from types import CodeType
from typing import Literal, Self

from torch import Tensor
from torch.overrides import TorchFunctionMode

from tenure._callers import Capture, Site, opening_site
from tenure._text import counted

Reference = weakref.ref[Tensor]
Ledger = dict[int, Reference]
"""From the address of a handle to the reference; the hot path of the library writes it itself."""
Opener = tuple[CodeType, int, int]
"""Code, instruction and identity of the frame that opened an owner; it holds no frame."""
Status = Literal["not yet open", "open", "suspended", "closed"]

# compared by identity, as the hot paths do
NEW: Status = "not yet open"
OPEN: Status = "open"
SUSPENDED: Status = "suspended"
CLOSED: Status = "closed"


class Owner:
    """What owns tensors while it is open; how it opens and closes is Block's part."""

    # fmt: off
    __slots__ = (
        "__weakref__", "_gate", "_ledger", "_opener", "_outer", "_status", "_tracker", "capture",
        "name",
    )
    # fmt: on

    # The mode that may write to the ledger without asking further, so one comparison answers for
    # three: that of the owner's thread while it is open and notes no places; else None.
    _gate: TorchFunctionMode | None
    # Weak references only: what an owner owns still dies with its last handle.
    _ledger: Ledger
    # Kept until it is read: to spell a place takes longer than to open a scope.
    _opener: Opener
    # The owner that was current here when this one opened or was resumed; it may close before.
    _outer: Self | None
    # Only ever one of the four above, the very objects.
    _status: Status
    # The mode of the thread that opened it, and so of the only one that may use it.
    _tracker: TorchFunctionMode
    capture: Capture | None
    name: str | None

    @property
    def is_open(self) -> bool:
        """Whether it takes tensors, as its block runs and is no generator suspended at a yield."""
        return self._status is OPEN

    @property
    def closed(self) -> bool:
        """Whether its block has ended."""
        return self._status is CLOSED

    @property
    def outer(self) -> Self | None:
        """The nearest scope around this one that is still open."""
        scope = self._outer if self._status is not NEW else None
        while scope is not None and not scope.is_open:
            scope = scope._outer
        return scope

    @property
    def _owns_tensors(self) -> bool:
        return self._status is OPEN or self._status is SUSPENDED

    @property
    def site(self) -> Site:
        """Where its block was opened."""
        return opening_site(*self._opener)

    @property
    def label(self) -> str:
        """Its name as errors print it, ``<DisposeScope 'step'>``."""
        return f"<DisposeScope {self.name!r}>" if self.name else "<DisposeScope>"

    def __repr__(self) -> str:
        if self._status is NEW:
            return f"{self.label[:-1]} {NEW}>"
        owned = f", {counted(n_alive(self._ledger), 'tensor')}" if self._owns_tensors else ""
        return f"{self.label[:-1]} {self._status}{owned}, opened at {self.site}>"


def owns(ledger: Ledger, tensor: object) -> bool:
    """Whether this very handle is in ``ledger``."""
    # the entry may be of a dead handle that had this address before
    reference = ledger.get(id(tensor))
    return reference is not None and reference() is tensor


def alive(ledger: Ledger) -> list[Tensor]:
    """The tensors of ``ledger`` that are alive."""
    # here and below of a copy: the collector may run and let torch write to the ledger meanwhile
    return [tensor for reference in ledger.copy().values() if (tensor := reference()) is not None]


def n_alive(ledger: Ledger) -> int:
    """How many tensors of ``ledger`` are alive."""
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
