"""What ``%%tenure`` shows of a cell."""

from __future__ import annotations

from dataclasses import replace

from tenure._show import Paragraph, Part, Shown, Together
from tenure.profiler import Recording, SnapshotDiff


class CellReport(Shown):
    """What a cell took, and what it left.

    Args:
        recording: of the cell.
        left: what came and went with it; None where that was not looked for.
    """

    _is_spaced = True

    def __init__(self, recording: Recording, left: SnapshotDiff | None) -> None:
        self._recording, self._left = recording, left

    def __repr__(self) -> str:
        return str(self)

    def _parts(self) -> list[Part]:
        # what the cells before have made is in the file, and no news
        growth = tuple(each for each in self._recording.growth if each.last_step)
        parts: list[Part] = [*replace(self._recording, memory=None, growth=growth)._parts()]
        if self._recording.timeline is not None:
            parts += self._recording.tree()._parts()
        if self._left is not None and not self._left:
            parts.append(Paragraph("What the cell left", "nothing"))
        elif self._left is not None:
            parts.append(Together("What the cell left", self._left._parts()))
        return parts
