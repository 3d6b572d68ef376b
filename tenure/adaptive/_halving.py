"""The plainest search for a size: halve after each failure."""

from __future__ import annotations

from ._oom import OomInfo


class Halving:
    """Halves, down to a minimum."""

    def __init__(self, size: int, minimum: int) -> None:
        self._size = size
        self._minimum = minimum

    @property
    def size(self) -> int:
        """The size to try now."""
        return self._size

    def succeeded(self) -> None:
        """Nothing is remembered."""

    def failed(self, info: OomInfo) -> bool:
        """Go on with half; False below the minimum."""
        if self._size <= self._minimum:
            return False
        self._size = max(self._size // 2, self._minimum)
        return True
