"""What each option of ``tenure run`` is: one thing that is measured."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar


class Instrument(ABC):
    """Measures one thing of a program.

    Attributes:
        option: what asks for it, as notes call it.
        is_of_one_thread: whether it sees, and ends on, the thread on which it has begun alone.
        notes: what could not be measured, and why.
    """

    option: ClassVar[str]
    is_of_one_thread: ClassVar[bool] = False

    def __init__(self) -> None:
        self.notes: list[str] = []

    @abstractmethod
    def begin(self) -> None:
        """Measure from now on; torch has just been imported, on this thread."""

    @abstractmethod
    def end(self, error: BaseException | None) -> None:
        """Measure no more; the program's code has ended, and the frames of its error are there."""

    @abstractmethod
    def found(self) -> dict[str, Any]:
        """Fields of the recording."""

    def abandon(self) -> None:
        """Stand aside in a child of the program, which runs plainly."""
        self.end(None)
