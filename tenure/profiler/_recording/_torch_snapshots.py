"""Snapshots of torch's own, as ``torch.cuda.memory._dump_snapshot`` writes them.

Invariant: a file is read and never run. A pickle that names anything to call is refused.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from tenure._errors import ReportFormatError

from .._timeline import PeakRow, Track, summed

_MAGIC = b"\x80"
_MOST_FRAMES = 40
_MOST_BYTES = (1 << 63) - 1
_PREALLOCATED = "before the history began"
_US = 1e-6
# A terminal shows less, and a page not much more.
_MOST_POINTS = 1000
_SIGNS = {"alloc": 1, "free_completed": -1}
_Block = tuple[int, list[Any]]
"""The bytes of a block that is in use, and the frames that made it."""


def is_pickle(path: str | Path) -> bool:
    """Return whether a file begins as a pickle.

    Raises:
        OSError: it can't be read.
    """
    with open(path, "rb") as file:
        return file.read(1) == _MAGIC


def tracks_in(path: str | Path) -> tuple[Track, ...]:
    """Return the live bytes of each device in a snapshot, if memory is alive or was.

    Raises:
        ReportFormatError: it names something to call, is damaged, or is no snapshot.
        OSError: it can't be read.
    """
    with open(path, "rb") as file:
        try:
            found = _OnlyData(file).load()
        except ReportFormatError as error:
            raise ReportFormatError(f"{path} is refused: {error}") from None
        # a damaged pickle raises an error of any type
        except Exception as error:
            raise ReportFormatError(
                f"{path} is a damaged pickle, or no snapshot of torch ({type(error).__name__}: "
                f"{error}). Write it anew with torch.cuda.memory._dump_snapshot()."
            ) from None
    # torch.accelerator's are lists of segments alone
    if isinstance(found, list):
        found = {"segments": found}
    if not isinstance(found, dict) or not isinstance(found.get("segments"), list):
        raise ReportFormatError(
            f"{path} is a pickle, and no snapshot of torch: it has no segments. Write one with "
            "torch.cuda.memory._dump_snapshot()."
        )
    try:
        return tuple(_tracks_of(found))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ReportFormatError(
            f"{path} is no snapshot as torch makes them ({type(error).__name__}: {error})."
        ) from None


class _OnlyData(pickle.Unpickler):
    """Reads lists, dictionaries, text and numbers, which need no class and no function."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise ReportFormatError(
            f"the pickle names {module}.{name}, which would run when it is read. A snapshot of "
            "torch names nothing; don't open this file."
        )


def _tracks_of(snapshot: Mapping[str, Any]) -> Iterator[Track]:
    traces = snapshot.get("device_traces") or []
    alive: dict[int, dict[int, _Block]] = {device: {} for device in range(len(traces))}
    for segment in snapshot["segments"]:
        alive.setdefault(int(segment.get("device", 0)), {}).update(_blocks_of(segment))
    # a timeline writes the names of its devices, which may be the host
    names = dict(enumerate(snapshot.get("tenure_devices") or []))
    for device, blocks in sorted(alive.items()):
        events = traces[device] if device < len(traces) else []
        track = _track(str(names.get(device, f"cuda:{device}")), blocks, events)
        if track.peak_bytes > _MOST_BYTES:
            raise ValueError(f"{device} has more bytes than 64 bits can count")
        if track.peak_bytes:
            yield track


def _blocks_of(segment: Mapping[str, Any]) -> Iterator[tuple[int, _Block]]:
    for block in segment["blocks"]:
        if block["state"].startswith("active"):
            yield block["address"], (int(block["size"]), block.get("frames") or [])


def _track(device: str, alive: dict[int, _Block], events: list[Any]) -> Track:
    """Play the events backwards to where they begin, then forwards to their peak."""
    changes = [
        # asked for and done are two events; a block is in use up to the second
        (event["addr"], sign * int(event["size"]), event)
        for event in events
        if (sign := _SIGNS.get(event["action"], 0))
    ]
    begin_bytes = sum(n_bytes for n_bytes, _ in alive.values()) - sum(n for _, n, _ in changes)
    times, level = [0.0], max(0, begin_bytes)
    levels = [level]
    for _, n_bytes, event in changes:
        level += n_bytes
        times.append((int(event["time_us"]) - events[0]["time_us"]) * _US)
        # where the history began too late, it frees more than it knows of
        levels.append(max(0, level))
    peak = levels.index(max(levels))
    made = {address for address, n_bytes, _ in changes if n_bytes > 0}
    blocks = {address: block for address, block in alive.items() if address not in made}
    rest = levels[0] - sum(n_bytes for n_bytes, _ in blocks.values())
    for address, n_bytes, event in changes[:peak]:
        if n_bytes > 0:
            blocks[address] = n_bytes, event.get("frames") or []
        elif blocks.pop(address, None) is None:
            # it was there when the history began, and nothing else tells of it
            rest += n_bytes
    left = [PeakRow("", "", _stack(frames), n_bytes, 1) for n_bytes, frames in blocks.values()]
    if rest > 0:
        left.append(PeakRow("", "", (_PREALLOCATED,), rest, 1))
    # many of one place are one row
    by_stack = summed(left, lambda row: row.stack)
    rows = [PeakRow("", "", stack, *figures) for stack, figures in by_stack.items()]
    rows.sort(key=lambda row: (-row.n_bytes, row.stack))
    return Track(device, *_thinned(times, levels), levels[peak], times[peak], tuple(rows))


def _stack(frames: list[Any]) -> tuple[str, ...]:
    """Return frames in words, the outermost first; those of C++ only if there are no others."""
    python = [each for each in frames if each["filename"].endswith((".py", ">"))]
    told = [f"{f['filename']}:{f['line']} in {f['name']}" for f in (python or frames)]
    return tuple(reversed(told[:_MOST_FRAMES]))


def _thinned(times_s: list[float], levels: list[int]) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Return at most so many moments, each with the most since the one before it."""
    n, most = len(times_s), min(len(times_s), _MOST_POINTS)
    ends = [(i + 1) * n // most for i in range(most)]
    highest = tuple(max(levels[a:b]) for a, b in pairwise([0, *ends]))
    return tuple(times_s[end - 1] for end in ends), highest
