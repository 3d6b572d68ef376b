"""A report of memory as numbers and text: categories that add up to the total, device by device.

Invariant: on every device the bytes of the categories and the unexplained bytes are the total.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

from tenure._text import counted, format_bytes

from .._allocator import allocator_bytes, bytes_of_workspaces, cached_memory
from .._owners import CATEGORIES, StorageEntry, TensorRow

if TYPE_CHECKING:
    from rich.console import RenderableType

ROUNDING = "allocator rounding"
WORKSPACES = "library workspaces"
UNEXPLAINED = "unexplained"


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
    rows: tuple[TensorRow, ...]
    categories: dict[str, int]
    total_bytes: int
    is_counted: bool = False
    reserved_bytes: int | None = None
    device_used_bytes: int | None = None
    largest_free_bytes: int | None = None
    inactive_split_bytes: int | None = None

    @property
    def unexplained_bytes(self) -> int:
        """The part of the total that no tensor accounts for.

        Negative where storages lie in memory that the allocator does not count.
        """
        return self.total_bytes - sum(self.categories.values())

    @property
    def n_elements(self) -> int:
        """The elements of all tensors of the rows."""
        return sum(_numel(row) for row in self.rows)


@dataclass(frozen=True, slots=True, repr=False)
class MemReport:
    """The memory of all devices, or of one.

    Attributes:
        devices: the report of each device.
        verbose: whether the printed table names the owner of shared storages.
    """

    devices: tuple[DeviceReport, ...]
    verbose: bool = False

    @property
    def categories(self) -> dict[str, int]:
        """Bytes by category over all devices: "parameters", "buffers", "gradients" and so on."""
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

    def to_dict(self) -> dict[str, object]:
        """The report as numbers and text, fit for JSON."""
        return {
            "total_bytes": self.total_bytes,
            "unexplained_bytes": self.unexplained_bytes,
            "categories": self.categories,
            "devices": [_device_dict(device) for device in self.devices],
        }

    def __repr__(self) -> str:
        n_tensors = counted(len(self.rows), "tensor")
        return f"<MemReport of {n_tensors}, {format_bytes(self.total_bytes)}>"

    def __str__(self) -> str:
        from ._mem_table import mem_text

        return mem_text(self)

    def __rich__(self) -> RenderableType:
        from ._mem_table import mem_rich

        return mem_rich(self)

    def _repr_html_(self) -> str:
        from ._mem_table import mem_html

        return mem_html(self)


def build_report(
    entries: Sequence[StorageEntry],
    hollow: Sequence[TensorRow],
    *,
    device: torch.device | None = None,
    verbose: bool = False,
) -> MemReport:
    """Sort a census by device and take the totals of the allocators.

    Args:
        entries: the storages.
        hollow: tensors without memory.
        device: the only device to report, with the index that it has; None for all.
        verbose: as `MemReport.verbose`.
    """
    rows: dict[str, list[TensorRow]] = {}
    for row in (*(row for entry in entries for row in entry.rows), *hollow):
        rows.setdefault(row.device, []).append(row)
    names = sorted(rows) if device is None else [str(device)]
    found = (_device_report(name, rows.get(name, [])) for name in names)
    return MemReport(tuple(found), verbose)


def _device_report(name: str, rows: Sequence[TensorRow]) -> DeviceReport:
    categories: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    for row in rows:
        categories[row.category] = categories.get(row.category, 0) + row.n_bytes
    device = torch.device(name)
    counted = allocator_bytes(device)
    if counted is None:
        return DeviceReport(name, tuple(rows), categories, sum(categories.values()))
    cached = cached_memory(device)
    workspaces = bytes_of_workspaces(device, cached, (row.n_bytes for row in rows))
    if workspaces is not None:
        categories[WORKSPACES] = workspaces
    categories[ROUNDING] = counted.allocated - counted.requested
    return DeviceReport(
        name,
        tuple(rows),
        categories,
        counted.allocated,
        True,
        counted.reserved,
        counted.device_used,
        None if cached is None else cached.largest_free_bytes,
        None if cached is None else cached.inactive_split_bytes,
    )


def _numel(row: TensorRow) -> int:
    sizes = [size for size in row.shape if isinstance(size, int)]
    return math.prod(sizes) if len(sizes) == len(row.shape) else 0


def _device_dict(device: DeviceReport) -> dict[str, object]:
    return {
        "device": device.device,
        "total_bytes": device.total_bytes,
        "unexplained_bytes": device.unexplained_bytes,
        "is_counted": device.is_counted,
        "reserved_bytes": device.reserved_bytes,
        "device_used_bytes": device.device_used_bytes,
        "largest_free_bytes": device.largest_free_bytes,
        "inactive_split_bytes": device.inactive_split_bytes,
        "categories": dict(device.categories),
        "tensors": _tensor_dicts(device.rows),
    }


def _tensor_dicts(rows: Iterable[TensorRow]) -> list[dict[str, object]]:
    return [{**asdict(row), "shape": list(row.shape)} for row in rows]
