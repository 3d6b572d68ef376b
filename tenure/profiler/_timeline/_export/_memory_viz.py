"""A snapshot as ``torch.cuda.memory`` writes it, for ``python -m torch.cuda._memory_viz``.

What a line has in use at each time becomes blocks: what it has gained is one that is allocated,
what it has lost is freed, the newest first. Invariant: between two times all is freed before
anything is allocated, so what the viewer adds up is never more than the level, and is its peak at
the peak. Addresses are made up: each device has one segment, in which the lowest free place is
taken.
"""

from __future__ import annotations

import pickle
import re
from bisect import insort
from collections import defaultdict
from typing import Any

from .._timeline_report import DeviceTimeline, TimelineReport

# Its own unpickler, in JavaScript, knows protocols 2 to 4.
_PROTOCOL = 4
# of a cell itself no function is told
_FRAME = re.compile(r"(?P<file>.*)(?::|, line )(?P<line>\d+)(?: in (?P<name>.*))?")
_US_PER_S = 1e6
_FIRST_ADDRESS = 1 << 32


def memory_viz_pickle(report: TimelineReport) -> bytes:
    """The bytes of a ``.pickle``."""
    # The host is one device more, the last: the numbers of the others are their indices.
    order = sorted(report.devices, key=lambda each: (each.device == "cpu", each.device))
    began_us = report.began_at_ns / 1000
    traced = [_Traced(i, device, began_us) for i, device in enumerate(order)]
    snapshot = {
        "segments": [each.segment() for each in traced],
        "device_traces": [each.events for each in traced],
        "allocator_settings": {},
        "external_annotations": [
            annotation
            for span in report.scopes
            for annotation in (
                _annotation(span.name, "START", began_us + span.begin_s * _US_PER_S),
                _annotation(span.name, "END", began_us + span.end_s * _US_PER_S),
            )
        ],
    }
    return pickle.dumps(snapshot, protocol=_PROTOCOL)


def _annotation(name: str, stage: str, at_us: float) -> dict[str, Any]:
    return {"name": name, "stage": stage, "device": 0, "time_us": int(at_us)}


class _Traced:
    """The events of one device."""

    def __init__(self, index: int, device: DeviceTimeline, began_us: float) -> None:
        self.events: list[dict[str, Any]] = []
        self._index = index
        self._began_us = began_us
        self._addresses = _Addresses()
        # of each line the blocks that it has, the newest last
        self._blocks: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self._frames = _frames_by_line(device)
        for i, at_s in enumerate(device.times_s):
            self._go_to(at_s, {name: series[i] for name, series in device.by_line.items()})
        # a viewer can't draw a trace without events
        if not self.events:
            self._allocate("nothing", 1, 0.0)

    def segment(self) -> dict[str, Any]:
        """The segment that all blocks lie in, with those that are left at the end."""
        left = sorted(
            (address, n_bytes, name)
            for name, blocks in self._blocks.items()
            for address, n_bytes in blocks
        )
        blocks, end = [], _FIRST_ADDRESS
        for address, n_bytes, name in left:
            if address > end:
                blocks.append(_block(end, address - end, "inactive", []))
            blocks.append(_block(address, n_bytes, "active_allocated", self._frames.get(name, [])))
            end = address + n_bytes
        last = max(self._addresses.end, end)
        if last > end:
            blocks.append(_block(end, last - end, "inactive", []))
        in_use = sum(n_bytes for _, n_bytes, _ in left)
        return {
            "device": self._index,
            "address": _FIRST_ADDRESS,
            "total_size": last - _FIRST_ADDRESS,
            "allocated_size": in_use,
            "active_size": in_use,
            "requested_size": in_use,
            "stream": 0,
            "segment_type": "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": blocks,
        }

    def _go_to(self, at_s: float, levels: dict[str, int]) -> None:
        changes = {
            name: level - sum(n for _, n in self._blocks[name]) for name, level in levels.items()
        }
        remainders = [
            (name, self._free(name, -change, at_s))
            for name, change in changes.items()
            if change < 0
        ]
        for name, change in [*remainders, *changes.items()]:
            if change > 0:
                self._allocate(name, change, at_s)

    def _free(self, name: str, n_bytes: int, at_s: float) -> int:
        """Free blocks of a line; returns the bytes of the last of them that it goes on with."""
        while n_bytes > 0:
            address, size = self._blocks[name].pop()
            self._addresses.free(address, size)
            for action in ("free_requested", "free_completed"):
                self._note(action, address, size, name, at_s)
            n_bytes -= size
        return -n_bytes

    def _allocate(self, name: str, n_bytes: int, at_s: float) -> None:
        address = self._addresses.take(n_bytes)
        self._blocks[name].append((address, n_bytes))
        self._note("alloc", address, n_bytes, name, at_s)

    def _note(self, action: str, address: int, n_bytes: int, name: str, at_s: float) -> None:
        self.events.append(
            {
                "action": action,
                "addr": address,
                "size": n_bytes,
                "stream": 0,
                "time_us": int(self._began_us + at_s * _US_PER_S),
                "frames": self._frames.get(name) or [_frame(name)],
            }
        )


class _Addresses:
    """Places in one stretch of addresses, the lowest that is free first.

    Attributes:
        end: where the part that was ever used ends.
    """

    def __init__(self) -> None:
        self.end = _FIRST_ADDRESS
        self._free: list[tuple[int, int]] = []

    def take(self, n_bytes: int) -> int:
        for i, (address, size) in enumerate(self._free):
            if size >= n_bytes:
                self._free[i : i + 1] = (
                    [(address + n_bytes, size - n_bytes)] if size > n_bytes else []
                )
                return address
        address, self.end = self.end, self.end + n_bytes
        return address

    def free(self, address: int, n_bytes: int) -> None:
        insort(self._free, (address, n_bytes))
        merged: list[tuple[int, int]] = []
        for begin, size in self._free:
            if merged and sum(merged[-1]) == begin:
                merged[-1] = merged[-1][0], merged[-1][1] + size
            else:
                merged.append((begin, size))
        self._free = merged


def _block(address: int, n_bytes: int, state: str, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "address": address,
        "size": n_bytes,
        "requested_size": n_bytes,
        "state": state,
        "frames": frames,
    }


def _frames_by_line(device: DeviceTimeline) -> dict[str, list[dict[str, Any]]]:
    """The calls that led to each line, innermost first, as far as they are known at the peak."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in device.at_peak:
        if row.stack:
            found.setdefault(row.stack[-1], [_frame(name) for name in reversed(row.stack)])
    return found


def _frame(name: str) -> dict[str, Any]:
    found = _FRAME.fullmatch(name)
    if found is None:
        return {"filename": "", "line": 0, "name": name}
    return {
        "filename": found["file"],
        "line": int(found["line"]),
        "name": found["name"] or "<module>",
    }
