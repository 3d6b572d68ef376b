import os
import pickle

import pytest

from tenure import ReportFormatError
from tenure.profiler import Recording

from .makers import MIB, pickled, torch_snapshot


def test_a_snapshot_of_torch_is_played_to_its_peak(tmp_path):
    found = Recording.load(pickled(tmp_path / "snapshot.pickle", torch_snapshot()))
    (track,) = found.over_time
    assert (track.device, track.peak_bytes, track.peak_at_s) == ("cuda:0", 16 * MIB, 2.0)
    assert found.peaks == {"cuda:0": 16 * MIB}
    assert track.live_bytes == tuple(n * MIB for n in (4, 8, 16, 8, 9, 8))
    assert [(block.stack[-1:], block.n_bytes) for block in track.at_peak] == [
        (("model.py:7 in forward",), 8 * MIB),
        ((), 4 * MIB),
        (("train.py:4 in step",), 4 * MIB),
    ]
    assert sum(block.n_bytes for block in track.at_peak) == track.peak_bytes
    assert str(found.tree()) == (
        "cuda:0, at its peak after 2.0 s: 16.0 MiB\n"
        "  12.0 MiB  75%  train.py:9 in <module>\n"
        "   8.0 MiB  50%   model.py:7 in forward\n"
        "   4.0 MiB  25%   train.py:4 in step\n"
        "   4.0 MiB  25%  unknown"
    )


def test_what_was_freed_and_had_been_there_before_counts_until_then(tmp_path):
    snapshot = torch_snapshot()
    events = snapshot["device_traces"][0]
    events.insert(4, {"action": "free_completed", "addr": 1, "size": 3 * MIB, "time_us": 4_500_000})
    (track,) = Recording.load(pickled(tmp_path / "s.pickle", snapshot)).over_time
    assert track.peak_bytes == 19 * MIB
    assert sum(block.n_bytes for block in track.at_peak) == 19 * MIB
    assert ("before the history began",) in [block.stack for block in track.at_peak]


def test_a_snapshot_without_history_has_what_is_alive(tmp_path):
    snapshot = torch_snapshot() | {"device_traces": []}
    for name, value in (("dict", snapshot), ("list", snapshot["segments"])):
        (track,) = Recording.load(pickled(tmp_path / name, value)).over_time
        assert (track.peak_bytes, len(track.at_peak)) == (8 * MIB, 2)


class _Evil:
    def __init__(self, function, *arguments):
        self._made = function, arguments

    def __reduce__(self):
        return self._made


@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
@pytest.mark.parametrize(
    ("value", "name"),
    [
        (_Evil(eval, "open('ran', 'w')"), "eval"),
        ({"segments": [_Evil(os.mkdir, "ran")]}, "mkdir"),
        (os.system, "system"),
    ],
    ids=["eval", "inside", "a name alone"],
)
def test_a_pickle_that_names_something_is_refused_by_name_and_runs_nothing(
    value, name, protocol, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    path = pickled(tmp_path / "evil.pickle", value, protocol)
    with pytest.raises(ReportFormatError, match=rf"refused: the pickle names \w+\.{name}, which"):
        Recording.load(path)
    assert [each.name for each in tmp_path.iterdir()] == ["evil.pickle"]


def _with_event(**changes):
    made = {"action": "alloc", "addr": 1, "size": 5, "time_us": 0, "frames": []}
    return {"segments": [], "device_traces": [[made | changes]]}


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ({"a": 1}, "is a pickle, and no snapshot of torch"),
        ({"segments": [{"blocks": [{"size": 1}]}]}, "is no snapshot as torch makes them"),
        ({"segments": [{"device": float("inf"), "blocks": []}]}, "cannot convert float infinity"),
        (_with_event(size=10**400), "more bytes than 64 bits can count"),
        (_with_event(time_us=float("nan")), "cannot convert float NaN"),
        (_with_event(frames=[{"filename": 3, "line": 1, "name": "f"}]), "is no snapshot as torch"),
    ],
    ids=lambda each: str(each)[:60],
)
def test_another_pickle_is_refused_in_one_line(value, complaint, tmp_path):
    with pytest.raises(ReportFormatError, match=complaint) as refused:
        Recording.load(pickled(tmp_path / "x", value))
    assert "\n" not in str(refused.value)


def test_a_damaged_pickle_is_refused_wherever_it_is_cut(tmp_path):
    path = pickled(tmp_path / "x", torch_snapshot())
    whole = path.read_bytes()
    for end in range(2, len(whole) - 1, 37):
        path.write_bytes(whole[:end])
        with pytest.raises(ReportFormatError, match="damaged"):
            Recording.load(path)
