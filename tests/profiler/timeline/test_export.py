"""Files are read by the tools that they are for."""

import base64
import csv
import json
import pickle
import re

import pytest
import torch
from torch.profiler import profile

from tenure import NewDisposeScope
from tenure.profiler import ProfilerUsageError, Recording, Timeline
from tests.programs import run_program

from .programs import training


@pytest.fixture(scope="module")
def report():
    with Timeline() as timeline, NewDisposeScope("training"):
        training("GPT")()
    return timeline.report


@pytest.mark.slow
def test_torchs_own_viewer_draws_it(report, tmp_path):
    path, drawn = report.export(tmp_path / "run.pickle"), tmp_path / "run.html"
    done = run_program("-m", "torch.cuda._memory_viz", "trace_plot", str(path), "-o", str(drawn))
    assert done.returncode == 0, done.stderr
    (data,) = re.findall(r'"base64": "([^"]*)"', drawn.read_text())
    assert pickle.loads(base64.b64decode(data)) == pickle.loads(path.read_bytes())


def test_tenure_reads_the_peak_and_its_lines_in_it(report, tmp_path):
    (track,) = Recording.load(report.export(tmp_path / "run.pickle")).tracks
    assert track.device == "cpu"
    assert track.peak_bytes == report.devices[0].peak_bytes
    assert sum(row.n_bytes for row in track.at_peak) == track.peak_bytes
    assert any("programs.py" in row.stack[-1] for row in track.at_peak)


def test_counters_stand_at_the_times_of_torch_profilers_own_file(tmp_path):
    with profile() as profiler, torch.profiler.record_function("whole"), Timeline() as timeline:
        torch.ones(10) + 1
    profiler.export_chrome_trace(str(tmp_path / "torch.json"))
    theirs = json.loads((tmp_path / "torch.json").read_text())
    ours = json.loads(timeline.export(tmp_path / "ours.json").read_text())
    assert ours["baseTimeNanoseconds"] == theirs["baseTimeNanoseconds"]
    (whole,) = (
        each
        for each in theirs["traceEvents"]
        if each.get("name") == "whole" and each.get("ph") == "X" and "cat" in each
        if each["cat"] == "user_annotation"
    )
    times = [each["ts"] for each in ours["traceEvents"] if each["ph"] == "C"]
    assert times
    assert whole["ts"] <= min(times) <= max(times) <= whole["ts"] + whole["dur"]


def test_counters_add_up_and_scopes_are_spans(report, tmp_path):
    events = json.loads(report.export(tmp_path / "run.json").read_text())["traceEvents"]
    counters = [each for each in events if each["ph"] == "C" and "cpu" in each["name"]]
    assert max(sum(each["args"].values()) for each in counters) == report.devices[0].peak_bytes
    assert [each["name"] for each in events if each["ph"] == "X"] == ["training"]


def test_a_speedscope_profile_weighs_the_stacks_at_the_peak(report, tmp_path):
    data = json.loads(report.export(tmp_path / "run.speedscope.json").read_text())
    (shown,) = data["profiles"]
    assert sum(shown["weights"]) == shown["endValue"] == report.devices[0].peak_bytes
    frames = [each["name"] for each in data["shared"]["frames"]]
    assert all(0 <= i < len(frames) for sample in shown["samples"] for i in sample)
    assert any("programs.py" in name for name in frames)


def test_a_table_has_a_row_for_each_time(report, tmp_path):
    with report.export(tmp_path / "run.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["live bytes"]) for row in rows] == [*report.devices[0].live_bytes]
    parts = [name for name in rows[0] if name not in {"device", "seconds", "live bytes"}]
    assert all(sum(int(row[name]) for name in parts) == int(row["live bytes"]) for row in rows)


def test_an_ending_that_nobody_knows_is_refused_with_those_that_there_are(report, tmp_path):
    with pytest.raises(ProfilerUsageError, match=r"'run.xyz'.* nothing was written.*\.csv.*\.json"):
        report.export(tmp_path / "run.xyz")
    assert list(tmp_path.iterdir()) == []
