"""Where a tensor was made, as far as a scope has noted it.

The note is a weak reference to the tensor, so it goes with the tensor and keeps nothing alive.
"""

from __future__ import annotations

import weakref
from typing import Any, Self

from torch import Tensor


class SitedRef(weakref.ref[Tensor]):
    """A weak reference that also knows where its tensor was made."""

    __slots__ = ("site",)
    site: Any

    def __new__(cls, tensor: Tensor, site: object) -> Self:
        reference = super().__new__(cls, tensor)
        reference.site = site
        return reference


def created_at(tensor: Tensor) -> str | None:
    """Where a scope with ``capture=`` saw the tensor being made, as ``train.py:41``; else None."""
    for reference in weakref.getweakrefs(tensor):
        if type(reference) is SitedRef:
            return str(reference.site)
    return None
