"""The passing pages that no forward uses, and which of them something still holds.

Invariant: a page in `free` was held by nothing when it was last looked at. Looking takes time, and
so only those that were held are looked at again.
"""

from __future__ import annotations

from .._model import Unit
from ._page import Page


class IdlePages:
    """Pages between the end of their use and the end of their place."""

    def __init__(self) -> None:
        self._free: dict[Unit, Page] = {}
        self._held: dict[Unit, Page] = {}

    def add(self, page: Page) -> None:
        """Nothing uses a page any more; something may hold it."""
        (self._held if page.is_held() else self._free)[page.unit] = page

    def discard(self, page: Page) -> None:
        """A page is used again, or its place is given back."""
        self._free.pop(page.unit, None)
        self._held.pop(page.unit, None)

    def clear(self) -> None:
        """Forget all."""
        self._free.clear()
        self._held.clear()

    def free(self) -> dict[Unit, Page]:
        """Those that nothing holds, in the order in which that was found out."""
        for page in list(self._held.values()):
            if not page.is_held():
                del self._held[page.unit]
                self._free[page.unit] = page
        return self._free

    def take(self, page: Page) -> bool:
        """Discard a page if nothing holds it now: who had a weak reference may have it again."""
        self.discard(page)
        if page.is_held():
            self._held[page.unit] = page
            return False
        return True
