"""What a Courtesy moved, and what it could not move and why; holds no tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from tenure._show import Paragraph, Part, Report
from tenure._text import counted, format_bytes


@dataclass(frozen=True, slots=True)
class Stay:
    """Memory that stayed on its device.

    Attributes:
        text: the tensor, as ``float32[4, 4] on cuda:0, 64 B``; without one, the storage.
        n_bytes: bytes of the storage.
        reason: why it can't be moved.
        held_by: who holds the tensor, as ``main.<locals>.x``; empty where that has no name, and
            beyond the first few.
    """

    text: str
    n_bytes: int
    reason: str
    held_by: str = ""

    def __str__(self) -> str:
        holder = f", held by {self.held_by}" if self.held_by else ""
        return f"{self.text}{holder}: {self.reason}"


@dataclass(frozen=True, slots=True)
class CourtesyReport(Report):
    """What became of the memory of accelerators; ``print`` shows it.

    Attributes:
        moved_bytes: bytes that are in host memory now.
        n_storages: storages that they are the bytes of.
        n_tensors: tensors that share these storages, those that only a graph holds among them.
        stays: what stayed on its device although a tensor of the program has it.
        left_bytes: by device, what its allocator still counts as allocated; without statistics
            the device is missing.
        left_reserved_bytes: by device, what its allocator still keeps from other processes.
        note: why there was nothing to move; else empty.
    """

    moved_bytes: int
    n_storages: int
    n_tensors: int
    stays: tuple[Stay, ...] = ()
    left_bytes: Mapping[str, int] = field(default_factory=dict)
    left_reserved_bytes: Mapping[str, int] = field(default_factory=dict)
    note: str = ""

    _figures: ClassVar = ("stays_bytes",)

    @property
    def stays_bytes(self) -> int:
        """Bytes of all that stayed."""
        return sum(stay.n_bytes for stay in self.stays)

    def _parts(self) -> list[Part]:
        if self.note:
            return [Paragraph("", f"Courtesy moved nothing: {self.note}")]
        lines = [
            f"Courtesy moved {format_bytes(self.moved_bytes)} to host memory "
            f"({counted(self.n_storages, 'storage')}, {counted(self.n_tensors, 'tensor')})."
        ]
        if self.stays:
            lines.append(f"{format_bytes(self.stays_bytes)} stay where they are:")
            lines += [f"  {stay}" for stay in self.stays]
        for device, allocated_bytes in self.left_bytes.items():
            reserved_bytes = self.left_reserved_bytes.get(device, allocated_bytes)
            reserved = f", and {format_bytes(reserved_bytes)} reserved"
            lines.append(
                f"{device} has {format_bytes(allocated_bytes)} allocated"
                f"{reserved if reserved_bytes != allocated_bytes else ''} now."
            )
        return [Paragraph("", "\n".join(lines))]
