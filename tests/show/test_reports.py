"""Reports outlive their process: what JSON has of one reads back as the same report."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import tenure
from tenure import LeakReport, ReportFormatError, adaptive, paging, profiler
from tenure.profiler import MemReport, RecordsDisplay, Snapshot, snapshot

from .report_samples import LEAKS, LINES, MEMORY, REPORTS

PUBLIC = {
    value
    for room in (tenure, adaptive, paging, profiler)
    for value in vars(room).values()
    if isinstance(value, type) and hasattr(value, "from_dict") and hasattr(value, "text")
}
WRITTEN = {name: each for name, each in REPORTS.items() if type(each) in PUBLIC - {Snapshot}}
HISTORY = []


def read_again(report):
    return type(report).from_dict(json.loads(json.dumps(report.to_dict())))


@pytest.mark.parametrize("report", WRITTEN.values(), ids=WRITTEN)
def test_what_was_written_reads_as_the_same_report(report):
    again, facts = read_again(report), report.to_dict()
    assert (str(again), repr(again)) == (str(report), repr(report))
    assert again._repr_html_() == report._repr_html_()
    assert again.to_dict() == facts
    assert again == report
    assert (facts["format"], facts["version"]) == (f"tenure.{type(report).__name__}", 1)


def test_every_public_report_is_held_by_these_tests():
    assert {type(report) for report in WRITTEN.values()} | {Snapshot} == PUBLIC


@pytest.mark.parametrize("error", [float("nan"), float("inf"), float("-inf"), np.float32(0.5), 1])
def test_a_number_that_json_has_no_word_for_is_written_all_the_same(error):
    report = adaptive.SplitReport((2, 1), error, (adaptive.SplitDifference("loss", "", error),))
    strict = json.dumps(report.to_dict(), allow_nan=False)
    assert str(type(report).from_dict(json.loads(strict))) == str(report)


def test_a_leaked_jagged_tensor_is_read_with_its_symbolic_size():
    with tenure.NewDisposeScope("s", policy="report") as scope:
        HISTORY.append(torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged))
    HISTORY.clear()
    assert any(type(n) is str for record in scope.leaks.records for n in record.shape)
    assert read_again(scope.leaks) == scope.leaks


# snapshots


def test_memory_without_a_storage_is_compared_by_name_beside_storages():
    there = torch.ones(256)  # or there may be no tensor at all
    (kept,) = (entry for entry in snapshot()._entries[:1])
    del there
    hidden = [replace(kept, identity=None)] * 2
    before, now = (Snapshot((kept, *more), MEMORY) for more in ([], hidden))
    assert now.diff(before).new == (kept.owner, kept.owner)
    assert before.diff(now).freed == (kept.owner, kept.owner)


# what can't be read


def altered(report, value, *path):
    facts = inner = json.loads(json.dumps(report.to_dict()))
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return facts


@pytest.mark.parametrize(
    ("kind", "data", "message"),
    [
        (MemReport, [], r"^MemReport\.from_dict\(\) got \[\], which is no report of tenure\. Pass"),
        (
            MemReport,
            altered(MEMORY, "tenure.Snapshot", "format"),
            r"got 'tenure\.Snapshot', which is another kind of report\. Read it with "
            r"Snapshot\.from_dict\(\)\.$",
        ),
        (
            MemReport,
            altered(MEMORY, 2, "version"),
            r"got version 2 of 'tenure\.MemReport', and this tenure knows version 1\. Read it with "
            r"the tenure that wrote it, or update this one\.$",
        ),
        (
            MemReport,
            altered(MEMORY, "all", "devices"),
            r"^MemReport\.devices is 'all', and no tuple\[.*write it anew\.$",
        ),
        (
            MemReport,
            altered(MEMORY, [{}], "devices"),
            r"^MemReport\.devices\[0\]\.device is missing\. It was cut or",
        ),
        (
            LeakReport,
            altered(LEAKS, "abacus:0", "records", 1, "device"),
            r"^LeakReport\.records\[1\]\.device is 'abacus:0', a device that",
        ),
        (
            RecordsDisplay,
            altered(LINES, [1, ""], "sections", 0, "rows", 0),
            r"rows\[0\] has 2 values, and should have 3\. ",
        ),
    ],
)
def test_what_is_no_such_report_is_refused(kind, data, message):
    with pytest.raises(ReportFormatError, match=message):
        kind.from_dict(data)
