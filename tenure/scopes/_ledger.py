"""Which tensors a scope owns: weakly, by identity, at a cost that does not grow with time.

The key is the address of the handle. A dead handle's entry is overwritten by the next tensor made
at its address, so a million temporaries leave a handful of entries instead of a million.
"""

from __future__ import annotations

import weakref
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


class Ledger(dict[int, Reference]):
    """A weak set of handles, spelled as the dict from address to reference that it is.

    The one hot path of the library writes ``ledger[id(tensor)] = ref(tensor)`` itself.
    """

    __slots__ = ()

    def owns(self, tensor: object) -> bool:
        """Whether this very handle is in here."""
        reference = self.get(id(tensor))
        return reference is not None and reference() is tensor

    def alive(self) -> list[Tensor]:
        """The tensors that are alive."""
        return [tensor for reference in self.copy().values() if (tensor := reference()) is not None]

    def n_alive(self) -> int:
        """How many tensors are alive."""
        return sum(reference() is not None for reference in self.copy().values())

    def add(self, reference: Reference) -> None:
        """Enter a tensor that is alive."""
        self[id(reference())] = reference

    def take(self, tensor: Tensor) -> Reference | None:
        """Remove a tensor and return its reference; None if it is not in here."""
        return self.pop(id(tensor)) if self.owns(tensor) else None

    def take_all(self) -> list[tuple[Tensor, Reference]]:
        """Remove everything, and return what is still alive."""
        references = list(self.values())
        self.clear()
        return [(tensor, ref) for ref in references if (tensor := ref()) is not None]


def site_of(reference: Reference) -> Site | SiteStack | None:
    """Where the tensor behind ``reference`` was made, if that was captured."""
    return getattr(reference, "site", None)
