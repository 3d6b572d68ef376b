"""What a budget allows a model, from pass to pass: as here, what it was given at the start.

Invariant: it is asked where nothing of the model is under way that could not lose its place: as a
pass begins, before a unit is used, and when a pass is over.
"""

from __future__ import annotations


class Lease:
    """A budget that does not change."""

    @property
    def others_bytes(self) -> int:
        """The bytes that other models of the budget hold."""
        return 0

    def begin(self) -> None:
        """A pass begins: give memory back, or take some."""

    def look(self, *, goes_on: bool) -> None:
        """A unit is about to be used: give memory back where it is short.

        Args:
            goes_on: whether it is the unit that was used last.
        """

    def end(self) -> None:
        """The pass is over."""

    def more(self, n_bytes: int) -> bool:
        """Whether so many bytes may be allocated at once, for what runs needs them."""
        return False

    def gave_back(self) -> None:
        """Memory was given back to whoever had asked for it."""

    def close(self) -> None:
        """The model is unpaged."""
