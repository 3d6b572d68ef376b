"""Snapshots of torch's own: what ``torch.cuda.memory._dump_snapshot`` wrote.

Invariant: what a file says is checked before it is used, and the work is in proportion to the size
of the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from tenure._errors import ReportFormatError
from tenure._show import progress

from .._timeline import PeakRow, Track, summed
from ._plain_pickle import load_plain

_MAGIC = b"\x80"
_MOST_FRAMES = 40
_PREALLOCATED = "before the history began"
_US = 1e-6
# A terminal shows less, and a page not much more.
_MOST_POINTS = 1000
# torch counts devices in 8 bits
_MOST_DEVICES = 128
# of the name of a file or a function
_MOST_CHARACTERS = 400
_SIGNS = {"alloc": 1, "free_completed": -1}
_WRONG: dict[type, str] = {
    int: "a number is no whole one, or below 0",
    str: "a name is no text",
    list: "there is no list where one belongs",
    dict: "there is no dictionary where one belongs",
}
_Kind = TypeVar("_Kind")
_Block = tuple[int, list[Any]]
"""The bytes of a block that is in use, and the frames that made it."""


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


def _tracks_of(snapshot: Mapping[str, Any], n_bytes: int) -> Iterator[Track]:
    traces = [
        _checked(list, trace) for trace in _checked(list, snapshot.get("device_traces") or [])
    ]
    segments = [_checked(dict, segment) for segment in snapshot["segments"]]
    # each is written once: a file that tells of more refers to one many times
    if sum(len(_checked(list, s["blocks"])) for s in segments) + sum(map(len, traces)) > n_bytes:
        raise ValueError("it refers to the same blocks or events again and again")
    alive: dict[int, dict[int, _Block]] = {device: {} for device in range(len(traces))}
    for segment in segments:
        alive.setdefault(_checked(int, segment.get("device", 0)), {}).update(_blocks_of(segment))
    if max(alive, default=0) >= _MOST_DEVICES:
        raise ValueError(f"device {max(alive)} is beyond the {_MOST_DEVICES} that torch can count")
    # those that a timeline writes tell theirs, which may be the host
    names = dict(enumerate(_checked(list, snapshot.get("tenure_devices") or [])))
    stacks = _Stacks()
    for device, blocks in sorted(alive.items()):
        events = traces[device] if device < len(traces) else []
        name = _checked(str, names.get(device, f"cuda:{device}"))
        track = _track(name, blocks, events, stacks)
        if track.peak_bytes:
            yield track


def _blocks_of(segment: dict[str, Any]) -> Iterator[tuple[int, _Block]]:
    address = _checked(int, segment.get("address", 0))
    for each in segment["blocks"]:
        block = _checked(dict, each)
        n_bytes = _checked(int, block["size"])
        if _checked(str, block["state"]).startswith("active"):
            frames = block.get("frames")
            # older ones have a history for each block
            if not frames and block.get("history"):
                frames = _checked(dict, _checked(list, block["history"])[0]).get("frames")
            at = _checked(int, block.get("address", address))
            yield at, (n_bytes, _checked(list, frames or []))
        address += n_bytes


def _checked(kind: type[_Kind], value: object) -> _Kind:
    if type(value) is not kind or (isinstance(value, int) and value < 0):
        raise ValueError(_WRONG[kind])
    return value


class _Stacks:
    """The frames of storages in words. Many share theirs: each list and each frame is read once."""

    def __init__(self) -> None:
        self._frames: dict[int, tuple[bool, str]] = {}
        self._stacks: dict[int, tuple[str, ...]] = {}

    def of(self, frames: list[Any]) -> tuple[str, ...]:
        """Return the frames, the outermost first; those of C++ only if there are no others."""
        stack = self._stacks.get(id(frames))
        if stack is None:
            told = [self._told(frame) for frame in frames]
            listed = [text for is_python, text in told if is_python] or [text for _, text in told]
            stack = self._stacks[id(frames)] = tuple(reversed(listed[:_MOST_FRAMES]))
        return stack

    def _told(self, frame: object) -> tuple[bool, str]:
        told = self._frames.get(id(frame))
        if told is None:
            facts = _checked(dict, frame)
            file, function = _checked(str, facts["filename"]), _checked(str, facts["name"])
            # generated code has the line -1
            line = facts["line"]
            if type(line) is not int:
                raise ValueError("a line has no number")
            text = f"{file[-_MOST_CHARACTERS:]}:{line} in {function[:_MOST_CHARACTERS]}"
            told = self._frames[id(frame)] = (file.endswith(".py") or file.startswith("<")), text
        return told


def _track(device: str, alive: dict[int, _Block], events: list[Any], stacks: _Stacks) -> Track:
    """Play the events backwards to where they begin, then forwards to their peak."""
    changes = [
        # asked for and done are two events; a block is in use up to the second
        (_checked(int, event["addr"]), sign * _checked(int, event["size"]), event)
        for event in events
        if (sign := _SIGNS.get(_checked(dict, event)["action"], 0))
    ]
    begin_bytes = sum(n_bytes for n_bytes, _ in alive.values()) - sum(n for _, n, _ in changes)
    times, level = [0.0], max(0, begin_bytes)
    levels = [level]
    begin_us = next((_checked(int, e["time_us"]) for e in events if "time_us" in e), 0)
    for i, (_, n_bytes, event) in enumerate(changes):
        level += n_bytes
        times.append((_checked(int, event.get("time_us", begin_us + i)) - begin_us) * _US)
        # where the history began too late, it frees more than it knows of
        levels.append(max(0, level))
    peak = levels.index(max(levels))
    made = {address for address, n_bytes, _ in changes if n_bytes > 0}
    blocks = {address: block for address, block in alive.items() if address not in made}
    rest = levels[0] - sum(n_bytes for n_bytes, _ in blocks.values())
    for address, n_bytes, event in changes[:peak]:
        if n_bytes > 0:
            blocks[address] = n_bytes, _checked(list, event.get("frames") or [])
        elif blocks.pop(address, None) is None:
            # it was there when the history began, and nothing else tells of it
            rest += n_bytes
    left = [PeakRow("", "", stacks.of(frames), n_bytes, 1) for n_bytes, frames in blocks.values()]
    if rest > 0:
        left.append(PeakRow("", "", (_PREALLOCATED,), rest, 1))
    # many of one place are one row
    by_stack = summed(left, lambda row: row.stack)
    rows = [PeakRow("", "", stack, *figures) for stack, figures in by_stack.items()]
    rows.sort(key=lambda row: (-row.n_bytes, row.stack))
    return Track(device, *_thinned(times, levels), levels[peak], times[peak], tuple(rows))


def _thinned(times_s: list[float], levels: list[int]) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Return at most so many moments, each with the most since the one before it."""
    n, most = len(times_s), min(len(times_s), _MOST_POINTS)
    ends = [(i + 1) * n // most for i in range(most)]
    highest = tuple(max(levels[a:b]) for a, b in pairwise([0, *ends]))
    return tuple(times_s[end - 1] for end in ends), highest
