"""The memory of the processes that a program starts, such as workers of a data loader."""

from __future__ import annotations


class ChildMemory:
    """The most that the children of this process had in RAM together, when it was asked."""

    def __init__(self) -> None:
        self._most = (0, 0)

    def look(self) -> None:
        """Ask all of them."""
        import psutil

        n_bytes, n_children = 0, 0
        for child in psutil.Process().children(recursive=True):
            try:
                n_bytes += child.memory_info().rss
            # it has ended meanwhile
            except psutil.Error:
                continue
            n_children += 1
        self._most = max(self._most, (n_bytes, n_children))

    def notes(self) -> list[str]:
        """What there is to say, if there were any."""
        n_bytes, n_children = self._most
        if not n_children:
            return []
        # it imports torch
        from tenure._text import format_bytes

        processes = "1 child process" if n_children == 1 else f"{n_children} child processes"
        return [
            f"{processes} had {format_bytes(n_bytes)} in RAM, which is not part of the figures "
            "above; memory that several processes share counts in each"
        ]
