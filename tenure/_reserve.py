"""Memory that is kept for a report of what happened, which is wanted when there is none.

It is address space that was never touched: it takes none of the machine's memory, and counts where
a process is limited (``RLIMIT_DATA``, ``RLIMIT_AS``). A limit of a container counts what is touched
and ends the process without an error, so nothing is to be kept from it.
"""

from __future__ import annotations

import mmap

# what is shared with other processes, as it would be otherwise, is not in RLIMIT_DATA
_PRIVATE: dict[str, int] = (
    {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
)


class Reserve:
    """Bytes that are there when they are wanted: freed before the work, and taken again after it.

    Args:
        *sizes: in bytes, the largest first; the first that there is room for is kept, or none.
    """

    def __init__(self, *sizes: int) -> None:
        self._sizes = sizes
        self._kept: mmap.mmap | None = None

    @property
    def n_bytes(self) -> int:
        """What is kept now."""
        return 0 if self._kept is None else len(self._kept)

    def take(self) -> None:
        """Keep it, unless it is kept already."""
        if self._kept is not None:
            return
        for n_bytes in self._sizes:
            try:
                self._kept = mmap.mmap(-1, n_bytes, **_PRIVATE)
                return
            # less, or nothing: what is told is poorer then, and the program goes on
            except (OSError, MemoryError):
                continue

    def free(self) -> None:
        """Give it back to who needs it now."""
        if self._kept is not None:
            self._kept.close()
            self._kept = None
