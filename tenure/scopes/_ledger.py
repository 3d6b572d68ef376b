"""Which tensors a scope owns: weakly, by identity, at a cost that does not grow with time.

The key is the address of the handle. A dead handle's entry is overwritten by the next tensor made
at its address, so a million temporaries leave a handful of entries instead of a million.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Self

from torch import Tensor

from ._sites import Site, SiteStack


class SitedRef(weakref.ref[Tensor]):
    """A weak reference that also knows where its tensor was made."""

    __slots__ = ("site",)
    site: Site | SiteStack

    def __new__(cls, tensor: Tensor, site: Site | SiteStack) -> Self:
        reference = super().__new__(cls, tensor)
        reference.site = site
        return reference


Reference = weakref.ref[Tensor]


class Ledger:
    """A weak set of handles; ``refs`` is open to the one hot path that writes to it directly."""

    __slots__ = ("refs",)

    def __init__(self) -> None:
        self.refs: dict[int, Reference] = {}

    def __contains__(self, tensor: object) -> bool:
        reference = self.refs.get(id(tensor))
        return reference is not None and reference() is tensor

    def __iter__(self) -> Iterator[Tensor]:
        return (
            tensor for tensor in [ref() for ref in self.refs.copy().values()] if tensor is not None
        )

    def __len__(self) -> int:
        return sum(reference() is not None for reference in self.refs.copy().values())

    def add(self, reference: Reference) -> None:
        """Enter a tensor that is alive."""
        self.refs[id(reference())] = reference

    def take(self, tensor: Tensor) -> Reference | None:
        """Remove a tensor and return its reference; None if it is not in here."""
        return self.refs.pop(id(tensor)) if tensor in self else None

    def take_all(self) -> list[tuple[Tensor, Reference]]:
        """Remove everything, and return what is still alive."""
        references, self.refs = self.refs, {}
        pairs = [(reference(), reference) for reference in references.values()]
        return [(tensor, reference) for tensor, reference in pairs if tensor is not None]


def site_of(reference: Reference) -> Site | SiteStack | None:
    """Where the tensor behind ``reference`` was made, if that was captured."""
    return getattr(reference, "site", None)
