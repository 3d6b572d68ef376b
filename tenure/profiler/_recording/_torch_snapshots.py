"""Snapshots of torch's own: what ``torch.cuda.memory._dump_snapshot`` wrote.

Invariant: a file is read and never run. A pickle can call whatever it names; here it can name
nothing, so that lists, dictionaries, text and numbers are all that it can be.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tenure._errors import ReportFormatError
from tenure._show import progress

from .._timeline import PeakRow
from ._tracks import Track, summed, thinned

_MAGIC = b"\x80"
_MOST_FRAMES = 40
_PREALLOCATED = "before the history began"
_US = 1e-6
_BUFFER_BYTES = 1 << 20


def is_pickle(path: str | Path) -> bool:
    """Whether a file begins as a pickle.

    Raises:
        OSError: it can't be read.
    """
    with open(path, "rb") as file:
        return file.read(1) == _MAGIC


def read_snapshot(path: str | Path) -> dict[str, Any]:
    """Read a snapshot that torch wrote.

    Raises:
        ReportFormatError: it names something to call, is damaged, or is no snapshot.
        OSError: it can't be read.
    """
    name = Path(path).name
    try:
        with (
            progress(f"reading {name}", os.path.getsize(path), in_bytes=True) as done,
            io.BufferedReader(_Told(path, done), _BUFFER_BYTES) as file,
        ):
            found = _OnlyData(file, str(path)).load()
    except (ReportFormatError, OSError):
        raise
    # what a damaged pickle raises depends on where it is damaged
    except Exception as error:
        raise ReportFormatError(
            f"{path} is a damaged pickle ({type(error).__name__}: {error}). Write it anew with "
            "torch.cuda.memory._dump_snapshot()."
        ) from None
    # torch.accelerator's and older ones are lists of segments alone
    if isinstance(found, list):
        found = {"segments": found}
    if not isinstance(found, dict) or not isinstance(found.get("segments"), list):
        raise ReportFormatError(
            f"{path} is a pickle, and no snapshot of torch: it has no segments. Write one with "
            "torch.cuda.memory._dump_snapshot()."
        )
    return found


class _Told(io.FileIO):
    """A file that tells how much of it was read."""

    def __init__(self, path: str | Path, done: Callable[[int], None]) -> None:
        super().__init__(path)
        self._done = done

    def readinto(self, buffer: Any, /) -> int | None:
        n_bytes = super().readinto(buffer)
        self._done(n_bytes or 0)
        return n_bytes


class _OnlyData(pickle.Unpickler):
    """Reads what needs no class and no function."""

    def __init__(self, file: io.BufferedReader[Any], path: str) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> NoReturn:
        raise ReportFormatError(
            f"{self._path} is refused: the pickle names {module}.{name}, which would run when it "
            "is read. A snapshot of torch names nothing; don't open this file."
        )

    def persistent_load(self, pid: Any) -> NoReturn:
        raise ReportFormatError(
            f"{self._path} is refused: it refers to objects outside of it, and a snapshot of torch "
            "does not."
        )


class _Live(NamedTuple):
    n_bytes: int
    frames: Iterable[Mapping[str, Any]]


def tracks_of(snapshot: Mapping[str, Any], path: str | Path) -> tuple[Track, ...]:
    """The live bytes of each device, where memory is alive or was.

    Raises:
        ReportFormatError: the snapshot is not made as torch makes them.
    """
    try:
        traces = list(snapshot.get("device_traces") or [])
        segments = snapshot["segments"]
        n_devices = max([len(traces), *(int(s.get("device", 0)) + 1 for s in segments)], default=0)
        # those that a timeline writes tell theirs, which may be the host
        names = dict(enumerate(snapshot.get("tenure_devices") or ()))
        found = []
        for device in range(n_devices):
            alive = {
                address: live
                for segment in segments
                if segment.get("device", 0) == device
                for address, live in _blocks_of(segment)
            }
            events = traces[device] if device < len(traces) else []
            track = _track(str(names.get(device, f"cuda:{device}")), alive, list(events))
            if track.peak_bytes:
                found.append(track)
        return tuple(found)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ReportFormatError(
            f"{path} is no snapshot as torch makes them ({type(error).__name__}: {error})."
        ) from None


def _blocks_of(segment: Mapping[str, Any]) -> Iterator[tuple[int, _Live]]:
    address = int(segment.get("address", 0))
    for block in segment.get("blocks", ()):
        if str(block["state"]).startswith("active"):
            frames = block.get("frames") or ()
            # older ones have a history for each block
            if not frames and block.get("history"):
                frames = block["history"][0].get("frames") or ()
            yield int(block.get("address", address)), _Live(int(block["size"]), frames)
        address += int(block["size"])


def _stack(frames: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """The frames, the outermost first; those of C++ only where there are no others."""
    listed = [(str(f["filename"]), int(f["line"]), str(f["name"])) for f in frames]
    python = [frame for frame in listed if frame[0].endswith(".py") or frame[0].startswith("<")]
    chosen = (python or listed)[:_MOST_FRAMES]
    return tuple(f"{name}:{line} in {function}" for name, line, function in reversed(chosen))


def _track(device: str, alive: dict[int, _Live], events: list[Mapping[str, Any]]) -> Track:
    """Play the events backwards to where they begin, then forwards to their peak."""
    changes = [_change(event) for event in events]
    known = {change[0] for change in changes if change is not None and change[1] > 0}
    end_bytes = sum(live.n_bytes for live in alive.values())
    begin_bytes = max(0, end_bytes - sum(change[1] for change in changes if change is not None))
    live, peak_bytes, peak_index = begin_bytes, begin_bytes, -1
    times, levels = [0.0], [begin_bytes]
    first_us = next((int(e["time_us"]) for e in events if "time_us" in e), 0)
    for i, change in enumerate(changes):
        if change is None:
            continue
        live += change[1]
        times.append((int(events[i].get("time_us", first_us + i)) - first_us) * _US)
        levels.append(live)
        if live > peak_bytes:
            peak_bytes, peak_index = live, i
    peak_at_s = times[levels.index(peak_bytes)]
    blocks = _alive_at(peak_index, changes, events, alive, known, begin_bytes)
    return Track(device, *thinned(times, levels), peak_bytes, peak_at_s, blocks)


def _change(event: Mapping[str, Any]) -> tuple[int, int] | None:
    """The address and the bytes of an allocation, negative where it ends; None of the others."""
    action = event["action"]
    if action == "alloc":
        return int(event["addr"]), int(event["size"])
    # asked for and done are two events; a block is in use up to the second
    if action == "free_completed":
        return int(event["addr"]), -int(event["size"])
    return None


def _alive_at(
    index: int,
    changes: list[tuple[int, int] | None],
    events: list[Mapping[str, Any]],
    alive: Mapping[int, _Live],
    known: set[int],
    begin_bytes: int,
) -> tuple[PeakRow, ...]:
    before = {address: live for address, live in alive.items() if address not in known}
    made: dict[int, _Live] = {}
    freed_before = begin_bytes - sum(live.n_bytes for live in before.values())
    for i in range(index + 1):
        change = changes[i]
        if change is None:
            continue
        address, n_bytes = change
        if n_bytes > 0:
            made[address] = _Live(n_bytes, events[i].get("frames") or ())
        elif made.pop(address, None) is None:
            # it was there when the history began, and nothing else tells of it
            freed_before += n_bytes
    # in words those alone that are left: most of a history are gone again by then
    left = (*before.values(), *made.values())
    rows = [PeakRow("", "", _stack(live.frames), live.n_bytes, 1) for live in left]
    if freed_before > 0:
        rows.append(PeakRow("", "", (_PREALLOCATED,), freed_before, 1))
    return summed(rows)
