import gzip
import json
import os
import pickle

import pytest
import torch

from tenure import ReportFormatError
from tenure.profiler import (
    MemReporter,
    ProfilerUsageError,
    RecordedRanks,
    Recording,
    RecordingDiff,
    Timeline,
)
from tests.show.pages import assert_stands_alone, read_data, read_html
from tests.show.report_samples import LINES, OOM, RUN, SHORT, TIMELINE

from .makers import MIB, block, growth, pickled, recording, torch_snapshot, track


def test_a_recording_reads_back_from_its_file_as_it_was(tmp_path):
    path = tmp_path / "train.tenure"
    RUN.save(path)
    read = Recording.load(path)
    assert read.to_dict() == json.loads(json.dumps(RUN.to_dict()))
    assert str(read) == str(RUN)
    assert read._repr_html_() == RUN._repr_html_()
    assert [p.name for p in tmp_path.iterdir()] == ["train.tenure"]


def test_the_text_names_what_ran_and_what_grew_and_the_largest_device_first():
    text = str(recording(growth=(growth(),), rank=3, notes=("something was not seen",)))
    words = " ".join(text.split())
    assert "rank 3: python train.py --lr 1e-3 exit code 0 after 12.5 s" in words
    assert "losses grew by 6 tensors, 24 B and kept graphs of autograd alive, 1.0 MiB" in words
    assert text.index("cuda:0") < text.index("cpu ")
    assert "- something was not seen" in text


@pytest.mark.parametrize(
    ("name", "subject"),
    [
        (
            "default of f.<locals>.<lambda>: kept[…], held by Net.hooks[…], held by Trainer.net",
            "kept (default of f.<locals>.<lambda>, held by Net.hooks[…], held by Trainer.net)",
        ),
        ("closure of hook: seen['relu']", "seen['relu'] (closure of hook)"),
        (
            "Trainer.logs['a: b'][…], held by f.<locals>.t",
            "Trainer.logs['a: b'] (held by f.<locals>.t)",
        ),
        ("Trainer.logs['a: b']", "Trainer.logs['a: b']"),
    ],
    ids=["default", "closure", "held", "plain"],
)
def test_the_variable_that_grew_is_named_before_what_holds_it(name, subject):
    assert str(growth(name)).startswith(f"{subject} grew by 6 tensors, 24 B and kept graphs ")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"<html>", "is no file of tenure, or it is damaged"),
        ({"format": "tenure.MemReport", "version": 1}, "another kind of report"),
        ({"format": "tenure.Recording", "version": 99}, "version 99"),
        ({"format": "tenure.Recording", "version": 1}, "Recording.command is missing"),
        ([1], "has no report in it"),
        (10**400, "has no report in it"),
    ],
    ids=str,
)
def test_what_is_no_recording_is_refused_in_one_line_that_names_the_file(
    content, complaint, tmp_path
):
    path = tmp_path / "x.tenure"
    is_packed = not isinstance(content, bytes)
    path.write_bytes(gzip.compress(json.dumps(content).encode()) if is_packed else content)
    with pytest.raises(ReportFormatError, match=complaint) as refused:
        Recording.load(path)
    assert "\n" not in str(refused.value)
    assert str(path) in str(refused.value)


def test_the_tree_folds_calls_and_says_what_has_no_call():
    blocks = [
        block(6 * MIB, "a.py:1 in <module>", "a.py:5 in f", n=3),
        block(2 * MIB, "a.py:1 in <module>", "a.py:6 in g", scope="step"),
        block(MIB, "a.py:1 in <module>", "a.py:7 in f"),
        block(MIB, category="parameters"),
        block(10, "b.py:1 in tiny"),
    ]
    tree = recording(tracks=(track("cuda:0", 0, 12 * MIB, at_peak=blocks),)).tree()
    assert str(tree) == (
        "cuda:0, at its peak after 1.0 s: 12.0 MiB\n"
        "   7.0 MiB  58%  a.py:1 in <module>\n"
        "   6.0 MiB  50%   a.py:5 in f\n"
        "   1.0 MiB   8%   a.py:7 in f\n"
        "   2.0 MiB  17%  scope step\n"
        "   2.0 MiB  17%   a.py:1 in <module>\n"
        "   2.0 MiB  17%    a.py:6 in g\n"
        "   2.0 MiB  17%  unexplained\n"
        "   1.0 MiB   8%  parameters\n"
        "      10 B   0%  and 1 smaller"
    )
    assert type(tree).from_dict(json.loads(json.dumps(tree.to_dict()))) == tree


def test_without_a_peak_the_tree_is_of_the_end_and_says_so():
    weights = torch.ones(7, 11)
    reporter = MemReporter()
    reporter.collect_tensor()
    tree = recording(memory=reporter.get_stats(device="cpu")).tree()
    assert weights.numel() == 77
    text = str(tree)
    assert text.startswith("cpu, at the end: ")
    assert text.endswith("By category and name: no peak was recorded.")
    total = sum(branch.n_bytes for branch in tree.devices[0].branches)
    assert total == tree.devices[0].n_bytes


def test_a_diff_has_both_runs_on_one_axis():
    before = recording(
        duration_s=4.0,
        peaks={"cpu": 4 * MIB},
        tracks=(track("cpu", MIB, 2 * MIB, 4 * MIB, at_peak=[block(4 * MIB, "a.py:1 in f")]),),
    )
    blocks = [block(6 * MIB, "a.py:1 in f"), block(2 * MIB, "a.py:2 in f")]
    after = recording(
        command=("python", "train.py"),
        duration_s=5.0,
        peaks={"cpu": 8 * MIB},
        tracks=(track("cpu", MIB, 8 * MIB, 2 * MIB, MIB, MIB, at_peak=blocks),),
    )
    diff = RecordingDiff.of(before, after)
    assert (diff.peaks[0].before_bytes, diff.peaks[0].change_bytes) == (4 * MIB, 4 * MIB)
    assert [(c.before_bytes, c.after_bytes, c.name) for c in diff.lines] == [
        (4 * MIB, 6 * MIB, "a.py:1 in f"),
        (0, 2 * MIB, "a.py:2 in f"),
    ]
    text = str(diff)
    assert max(map(len, text.splitlines())) <= 80
    assert "cpu   4.0 MiB  8.0 MiB  +4.0 MiB" in text
    assert type(diff).from_dict(json.loads(json.dumps(diff.to_dict()))) == diff


class _Program:
    pass


def test_a_diff_tells_new_gone_and_grown_tensors_by_name():
    program = _Program()
    program.weights, program.old = torch.ones(7, 11), torch.ones(3)

    def look():
        reporter = MemReporter()
        reporter.collect_tensor()
        return recording(memory=reporter.get_stats(device="cpu"))

    before = look()
    program.piles = [torch.ones(1000), torch.ones(1000)]
    program.weights = torch.ones(7, 12)
    del program.old
    diff = RecordingDiff.of(before, look())
    found = {c.name.rpartition(".")[2]: (c.before_bytes, c.after_bytes) for c in diff.tensors}
    assert found == {"piles[…]": (0, 8000), "weights": (308, 336), "old": (12, 0)}
    assert max(map(len, str(diff).splitlines())) <= 80
    assert RecordingDiff.of(look(), look()).tensors == ()


def test_ranks_stand_side_by_side_and_the_largest_is_told_in_full():
    ranks = [recording(rank=i, peaks={"cuda:0": (3 + i % 2) * MIB}) for i in (2, 1, 0)]
    ranks[0] = recording(rank=2, ended="KeyboardInterrupt", exit_code=130, peaks={})
    report = RecordedRanks.of(ranks)
    assert [each.rank for each in report.recordings] == [0, 1, 2]
    assert report.largest.rank == 1
    text = str(report)
    assert text.startswith(
        "3 recordings\n"
        "rank  ended              seconds  device  at most\n"
        "----  -----------------  -------  ------  -------\n"
        "0     exit code 0           12.5  cuda:0  3.0 MiB\n"
        "1     exit code 0           12.5  cuda:0  4.0 MiB\n"
        "2     KeyboardInterrupt     12.5\n\n"
        "rank 1: python train.py"
    )
    assert RecordedRanks.from_dict(json.loads(json.dumps(report.to_dict()))) == report


def test_exports_by_extension(tmp_path):
    for name in ("x.json", "x.html", "X.HTML"):
        assert SHORT.export(str(tmp_path / name)) == tmp_path / name
    assert (tmp_path / "X.HTML").read_text() == (tmp_path / "x.html").read_text()
    with pytest.raises(ProfilerUsageError, match=r"x\.trace\.json asks for live bytes over time"):
        SHORT.export(tmp_path / "x.trace.json")
    assert Recording.from_dict(json.loads((tmp_path / "x.json").read_text())).memory == SHORT.memory
    assert_stands_alone((tmp_path / "x.html").read_text(), is_drawn=True)
    for end in ("xlsx", "csv"):
        told = rf"'x\.{end}', and there is no format for that ending; .*\.trace\.json"
        with pytest.raises(ProfilerUsageError, match=told):
            SHORT.export(tmp_path / f"x.{end}")


def test_an_ending_means_the_same_with_a_timeline_and_without(tmp_path):
    with Timeline() as timeline:
        torch.ones(8)
    found = recording(timeline=timeline.report, growth=(growth(),))
    for name in ("x.json", "x.html"):
        found.export(tmp_path / name)
    assert Recording.from_dict(json.loads((tmp_path / "x.json").read_text())).growth == found.growth
    for end in ("trace.json", "pickle", "speedscope.json"):
        mine, theirs = found.export(tmp_path / f"x.{end}"), timeline.export(tmp_path / f"y.{end}")
        assert mine.read_bytes() == theirs.read_bytes()
    assert "traceEvents" in json.loads((tmp_path / "x.trace.json").read_text())
    assert "$schema" in json.loads((tmp_path / "x.speedscope.json").read_text())


def test_a_difference_tells_what_grew_in_one_run_alone():
    leaky, fixed = recording(growth=(growth(),)), recording()
    (change,) = RecordingDiff.of(leaky, fixed).growth
    assert (change.after_bytes, change.name, change.before_bytes) == (0, "losses", MIB + 24)
    assert "Grew from step to step" in str(RecordingDiff.of(leaky, fixed))
    assert RecordingDiff.of(leaky, leaky).growth == ()
    assert RecordingDiff.of(leaky, recording(seeks_leaks=False)).growth == ()


def test_the_summary_names_what_grew_most_and_counts_the_others():
    *_, most, others = recording(growth=(growth(), growth("outs"))).summary().splitlines()
    assert most.startswith("losses grew by 6 tensors, 24 B and ")
    assert others == "1 more grew: tenure leaks lists them."


@pytest.mark.parametrize(
    ("steps", "n_steps", "told"),
    [
        ((1, 2, 3, 4, 6, 8, 16, 32, 40), 40, "Found no growth from step to step: looked 9 times "),
        ((1, 2, 3, 4, 6), 7, "Too short to judge growth (7 steps). Run at least 8 steps."),
        ((1,), 1, "Too short to judge growth (1 step). Run at least 8 steps."),
        ((1, 2, 3, 4, 6, 8, 16), 1000, "Not enough looks to judge growth: looked 7 times in "),
        ((1, 2, 4, 8), 8, "Found no growth from step to step: looked 4 times in 8 steps: last "),
        ((), 0, "No growth to judge: no optimizer made a step, and no model was called. Compare "),
    ],
    ids=str,
)
def test_no_growth_is_claimed_only_where_looks_lie_in_most_of_the_run(steps, n_steps, told):
    found = recording(growth=(), n_looks=len(steps), look_steps=steps, n_steps=n_steps)
    assert found.summary().splitlines()[-1].startswith(told)
    assert " ".join(str(found.leaks_found()).split()).startswith(told.strip())
    if steps[-1:] == (40,):
        assert found.summary().endswith(" in 40 steps: last after step 32, then at the end.")
    assert Recording.from_dict(found.to_dict()).look_steps == steps


# --- its page


def test_a_page_draws_the_timeline_and_tells_all_that_the_report_does(tmp_path):
    text = RUN.export(tmp_path / "page.html").read_text("utf-8")
    assert_stands_alone(text, is_drawn=True)
    drawn = read_data(text)
    facts = json.loads(json.dumps(TIMELINE.to_dict()))
    assert drawn == facts | {name: drawn[name] for name in ("named", "others")}
    shown = " ".join(read_html(text)[1].split())
    assert "Charts need JavaScript" in shown
    assert " ".join(RUN.text(top=50, width=120).split()) in shown
    assert "cuda:0 after 3.9 s: 39.0 MiB gradients, made at experiments/" in shown
    # how it ended and why memory ran out stand first
    parts = ("torch.OutOfMemoryError", OOM.first_line[:7], "At most", "Notes")
    at = [shown.index(part) for part in parts]
    assert at == sorted(at)
    assert read_data(TIMELINE.export(tmp_path / "alone.html").read_text("utf-8")) == drawn


def test_columns_and_code_that_a_narrow_terminal_has_no_room_for_are_left_out():
    found = recording(lines=LINES)
    shown = [{"alloc", "freed"}.intersection(found.text(width=n).split()) for n in (40, 120)]
    assert shown == [set(), {"alloc", "freed"}]
    # code goes on in no second line
    assert any(line.endswith("…") for line in found.text(width=60).splitlines())


# --- snapshots of torch


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
