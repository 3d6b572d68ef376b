"""A report of memory as numbers and text: categories that add up to the total, device by device.

Invariant: on every device the bytes of the categories and the unexplained bytes are the total.
Its tables have the headings of pytorch_memlab's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from tenure._show import (
    Amounts,
    Column,
    Paragraph,
    Part,
    Report,
    Table,
    bytes_column,
    note_on_shared,
    ranked,
    storage_bytes,
)
from tenure._text import counted, format_bytes

from .._allocator import allocator_bytes, bytes_of_workspaces
from .._owners import CATEGORIES, StorageEntry, TensorRow

ROUNDING = "allocator rounding"
WORKSPACES = "library workspaces"
UNEXPLAINED = "unexplained"

_USED = "Used MEM"
_COLUMNS = (
    Column("Element type"),
    Column("Size", ">", spare=2),
    bytes_column(_USED),
    Column("Category", spare=1),
    Column("Created at", spare=3),
)


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """The memory of one device.

    Attributes:
        device: the device, as ``cuda:0``.
        rows: its tensors, those of one storage together.
        categories: bytes by category, each storage in one.
        total_bytes: what the allocator of the device says is allocated; where there is no such
            count, as on the CPU, the bytes of all storages that were found.
        is_counted: the total is the allocator's.
        reserved_bytes: what the allocator took from the device, in use or cached; None if unknown.
        device_used_bytes: what all processes use of the device; None if unknown.
        largest_free_bytes: the largest block that is free in the allocator's cache; None where it
            tells nothing of its blocks.
        inactive_split_bytes: cached bytes that lie beside blocks in use, so that ``empty_cache()``
            can't give them back; None as above.
    """

    device: str
    rows: tuple[TensorRow, ...] = field(metadata={"key": "tensors"}, repr=False)
    categories: dict[str, int]
    total_bytes: int
    is_counted: bool = False
    reserved_bytes: int | None = None
    device_used_bytes: int | None = None
    largest_free_bytes: int | None = None
    inactive_split_bytes: int | None = None

    _figures: ClassVar = ("unexplained_bytes",)

    @property
    def unexplained_bytes(self) -> int:
        """The part of the total that no tensor accounts for.

        Negative where storages lie in memory that the allocator does not count.
        """
        return self.total_bytes - sum(self.categories.values())


@dataclass(frozen=True, slots=True, repr=False)
class MemReport(Report):
    """The memory of all devices, or of one.

    Attributes:
        devices: the report of each device.
        verbose: whether the printed table names the owner of shared storages.
    """

    devices: tuple[DeviceReport, ...]
    verbose: bool = False

    _figures: ClassVar = ("total_bytes", "unexplained_bytes", "categories")

    @property
    def categories(self) -> dict[str, int]:
        """Bytes by category over all devices, such as "parameters", "buffers" and "gradients"."""
        found = dict.fromkeys((*CATEGORIES, ROUNDING), 0)
        for device in self.devices:
            for name, n_bytes in device.categories.items():
                found[name] = found.get(name, 0) + n_bytes
        return found

    @property
    def unexplained_bytes(self) -> int:
        """The part of the total that no tensor accounts for."""
        return sum(device.unexplained_bytes for device in self.devices)

    @property
    def total_bytes(self) -> int:
        """The totals of all devices together."""
        return sum(device.total_bytes for device in self.devices)

    @property
    def rows(self) -> tuple[TensorRow, ...]:
        """The tensors of all devices."""
        return tuple(row for device in self.devices for row in device.rows)

    def __repr__(self) -> str:
        n_tensors = counted(len(self.rows), "tensor")
        return f"<MemReport of {n_tensors}, {format_bytes(self.total_bytes)}>"

    def _parts(self) -> list[Part]:
        if not self.devices:
            return [Paragraph("", "No tensors were found.")]
        return [part for device in self.devices for part in _parts_of(device, self.verbose)]


def _parts_of(device: DeviceReport, verbose: bool) -> Iterator[Part]:
    title = f"Storage on {device.device}"
    if device.rows:
        note = note_on_shared(row.owner is not None for row in device.rows)
        rows = [_cells(row, verbose=verbose) for row in device.rows]
        yield Table(title, _COLUMNS, rows, note, by=_USED)
    else:
        yield Paragraph(title, "No tensors are there.")
    amounts = [*device.categories.items(), (UNEXPLAINED, device.unexplained_bytes)]
    if any(n_bytes for _, n_bytes in amounts):
        used = format_bytes(sum(row.counted_bytes for row in device.rows))
        yield Amounts(f"Total: {counted(len(device.rows), 'tensor')}, {used}", ranked(amounts))
    yield Paragraph("", "\n".join(_allocator_lines(device)))


def build_report(
    entries: Sequence[StorageEntry],
    *,
    device: torch.device | None = None,
    verbose: bool = False,
) -> MemReport:
    """Sort a census by device and take the totals of the allocators.

    Args:
        entries: the storages.
        device: the only device to report, with the index that it has; None for all.
        verbose: as `MemReport.verbose`.
    """
    rows: dict[str, list[TensorRow]] = {}
    for row in (row for entry in entries for row in entry.rows):
        rows.setdefault(row.device, []).append(row)
    # A device that was asked for is reported even if nothing lies there.
    names = sorted(rows) if device is None else [str(device)]
    found = (_device_report(name, rows.get(name, [])) for name in names)
    return MemReport(tuple(found), verbose)


def _device_report(name: str, rows: Sequence[TensorRow]) -> DeviceReport:
    # All of them, at zero: a script may ask for any.
    categories: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    for row in rows:
        categories[row.category] = categories.get(row.category, 0) + row.counted_bytes
    device = torch.device(name)
    told = allocator_bytes(device)
    # The CPU: torch keeps no count of its bytes, so what was found is the total.
    if told is None:
        return DeviceReport(name, tuple(rows), categories, sum(categories.values()))
    workspaces = bytes_of_workspaces(device, told, (row.counted_bytes for row in rows))
    # cuBLAS's: blocks that torch keeps and no tensor has, which would be unexplained else.
    if workspaces is not None:
        categories[WORKSPACES] = workspaces
    categories[ROUNDING] = told.allocated - told.requested
    return DeviceReport(
        name,
        tuple(rows),
        categories,
        told.allocated,
        True,
        told.reserved,
        told.device_used,
        told.largest_free,
        told.inactive_split,
    )


def _cells(row: TensorRow, *, verbose: bool) -> list[str]:
    name = f"{row.name}(->{row.owner})" if verbose and row.owner is not None else row.label
    size = f"({', '.join(map(str, row.shape))}{',' if len(row.shape) == 1 else ''})"
    used = storage_bytes(row.n_bytes, is_shared=row.owner is not None)
    return [name, size, used, row.category, row.created_at or ""]


def _allocator_lines(device: DeviceReport) -> Iterator[str]:
    if not device.is_counted:
        yield f"The total is that of the storages found: {device.device} counts no live bytes."
        return
    yield (
        f"The allocated memory on {device.device}: {format_bytes(device.total_bytes)}, of "
        f"{format_bytes(device.reserved_bytes or 0)} that the allocator has reserved."
    )
    cached_bytes = (device.reserved_bytes or 0) - device.total_bytes
    # Free is not usable: a tensor larger than the largest block needs a new segment.
    if device.largest_free_bytes is not None and cached_bytes > 0:
        yield (
            f"Free of that: {format_bytes(cached_bytes)}, the largest block "
            f"{format_bytes(device.largest_free_bytes)}; beside blocks in use, where "
            f"empty_cache() can't reach it: {format_bytes(device.inactive_split_bytes or 0)}."
        )
    if device.device_used_bytes is not None:
        used = format_bytes(device.device_used_bytes)
        yield f"In use on {device.device} by all processes and the driver: {used}."
