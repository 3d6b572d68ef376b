"""Snapshots of torch's own: what ``torch.cuda.memory._dump_snapshot`` wrote.

Invariant: what a file says is checked before it is used, and the work is in proportion to the size
of the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tenure._errors import ReportFormatError
from tenure._show import progress

from .._timeline import PeakRow
from ._plain_pickle import load_plain
from ._tracks import Track, summed, thinned

_MAGIC = b"\x80"
_MOST_FRAMES = 40
_PREALLOCATED = "before the history began"
_US = 1e-6
# torch counts devices in 8 bits
_MOST_DEVICES = 128
# of the name of a file or a function
_MOST_CHARACTERS = 400


def is_pickle(path: str | Path) -> bool:
    """Whether a file begins as a pickle.

    Raises:
        OSError: it can't be read.
    """
    with open(path, "rb") as file:
        return file.read(1) == _MAGIC


def tracks_in(path: str | Path) -> tuple[Track, ...]:
    """The live bytes of each device in a snapshot that torch wrote, where memory is alive or was.

    Raises:
        ReportFormatError: it names something to call, is damaged, or is no snapshot.
        OSError: it can't be read.
    """
    data = Path(path).read_bytes()
    with progress(f"reading {Path(path).name}", len(data), in_bytes=True) as done:
        found = load_plain(data, str(path), done)
    # torch.accelerator's and older ones are lists of segments alone
    if isinstance(found, list):
        found = {"segments": found}
    if not isinstance(found, dict) or not isinstance(found.get("segments"), list):
        raise ReportFormatError(
            f"{path} is a pickle, and no snapshot of torch: it has no segments. Write one with "
            "torch.cuda.memory._dump_snapshot()."
        )
    try:
        return tuple(_tracks_of(found, len(data)))
    except (KeyError, TypeError, ValueError) as error:
        raise ReportFormatError(
            f"{path} is no snapshot as torch makes them ({type(error).__name__}: {error})."
        ) from None


class _Live(NamedTuple):
    n_bytes: int
    frames: list[Any]


def _tracks_of(snapshot: Mapping[str, Any], n_bytes: int) -> Iterator[Track]:
    traces = [_list(trace) for trace in _list(snapshot.get("device_traces") or [])]
    segments = [_dict(segment) for segment in snapshot["segments"]]
    # each is written once: a file that tells of more refers to one many times
    if sum(len(_list(s["blocks"])) for s in segments) + sum(map(len, traces)) > n_bytes:
        raise ValueError("it refers to the same blocks or events again and again")
    alive: dict[int, dict[int, _Live]] = {device: {} for device in range(len(traces))}
    for segment in segments:
        alive.setdefault(_number(segment.get("device", 0)), {}).update(_blocks_of(segment))
    if max(alive, default=0) >= _MOST_DEVICES:
        raise ValueError(f"device {max(alive)} is beyond the {_MOST_DEVICES} that torch can count")
    # those that a timeline writes tell theirs, which may be the host
    names = dict(enumerate(_list(snapshot.get("tenure_devices") or [])))
    stacks = _Stacks()
    for device, live in sorted(alive.items()):
        events = list(map(_dict, traces[device])) if device < len(traces) else []
        name = _text(names.get(device, f"cuda:{device}"))
        track = _track(name, live, events, stacks)
        if track.peak_bytes:
            yield track


def _blocks_of(segment: dict[str, Any]) -> Iterator[tuple[int, _Live]]:
    address = _number(segment.get("address", 0))
    for block in map(_dict, segment["blocks"]):
        n_bytes = _number(block["size"])
        if _text(block["state"]).startswith("active"):
            frames = block.get("frames")
            # older ones have a history for each block
            if not frames and block.get("history"):
                frames = _dict(_list(block["history"])[0]).get("frames")
            yield _number(block.get("address", address)), _Live(n_bytes, _list(frames or []))
        address += n_bytes


def _number(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("a number is no whole one, or below 0")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("a name is no text")
    return value


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError("there is no list where one belongs")
    return value


def _dict(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError("there is no dictionary where one belongs")
    return value


class _Stacks:
    """The frames of storages in words. Many share theirs: each list and each frame is read once."""

    def __init__(self) -> None:
        self._frames: dict[int, tuple[bool, str]] = {}
        self._stacks: dict[int, tuple[str, ...]] = {}

    def of(self, frames: list[Any]) -> tuple[str, ...]:
        """The frames, the outermost first; those of C++ only where there are no others."""
        stack = self._stacks.get(id(frames))
        if stack is None:
            told = [self._told(frame) for frame in frames]
            listed = [text for is_python, text in told if is_python] or [text for _, text in told]
            stack = self._stacks[id(frames)] = tuple(reversed(listed[:_MOST_FRAMES]))
        return stack

    def _told(self, frame: object) -> tuple[bool, str]:
        told = self._frames.get(id(frame))
        if told is None:
            facts = _dict(frame)
            file, function, line = _text(facts["filename"]), _text(facts["name"]), facts["line"]
            if type(line) is not int:
                raise TypeError("a line has no number")
            text = f"{file[-_MOST_CHARACTERS:]}:{line} in {function[:_MOST_CHARACTERS]}"
            told = self._frames[id(frame)] = (file.endswith(".py") or file.startswith("<")), text
        return told


def _track(
    device: str, alive: dict[int, _Live], events: list[dict[str, Any]], stacks: _Stacks
) -> Track:
    """Play the events backwards to where they begin, then forwards to their peak."""
    changes = [_change(event) for event in events]
    known = {change[0] for change in changes if change is not None and change[1] > 0}
    end_bytes = sum(live.n_bytes for live in alive.values())
    begin_bytes = max(0, end_bytes - sum(change[1] for change in changes if change is not None))
    live, peak_bytes, peak_index = begin_bytes, begin_bytes, -1
    times, levels = [0.0], [begin_bytes]
    first_us = next((_number(e["time_us"]) for e in events if "time_us" in e), 0)
    for i, change in enumerate(changes):
        if change is None:
            continue
        live += change[1]
        times.append((_number(events[i].get("time_us", first_us + i)) - first_us) * _US)
        # where the history began too late, it frees more than it knows of
        levels.append(max(0, live))
        if live > peak_bytes:
            peak_bytes, peak_index = live, i
    peak_at_s = times[levels.index(peak_bytes)]
    left, freed_before = _alive_at(peak_index, changes, events, alive, known, begin_bytes)
    # in words those alone that are left: most of a history are gone again by then
    rows = [PeakRow("", "", stacks.of(live.frames), live.n_bytes, 1) for live in left]
    if freed_before > 0:
        rows.append(PeakRow("", "", (_PREALLOCATED,), freed_before, 1))
    return Track(device, *thinned(times, levels), peak_bytes, peak_at_s, summed(rows))


def _change(event: dict[str, Any]) -> tuple[int, int] | None:
    """The address and the bytes of an allocation, negative where it ends; None of the others."""
    action = event["action"]
    if action == "alloc":
        return _number(event["addr"]), _number(event["size"])
    # asked for and done are two events; a block is in use up to the second
    if action == "free_completed":
        return _number(event["addr"]), -_number(event["size"])
    return None


def _alive_at(
    index: int,
    changes: list[tuple[int, int] | None],
    events: list[dict[str, Any]],
    alive: dict[int, _Live],
    known: set[int],
    begin_bytes: int,
) -> tuple[list[_Live], int]:
    """What is alive after an event, and the bytes of what is freed before and never allocated."""
    before = {address: live for address, live in alive.items() if address not in known}
    made: dict[int, _Live] = {}
    freed_before = begin_bytes - sum(live.n_bytes for live in before.values())
    for i in range(index + 1):
        change = changes[i]
        if change is None:
            continue
        address, n_bytes = change
        if n_bytes > 0:
            made[address] = _Live(n_bytes, _list(events[i].get("frames") or []))
        elif made.pop(address, None) is None:
            # it was there when the history began, and nothing else tells of it
            freed_before += n_bytes
    return [*before.values(), *made.values()], freed_before
