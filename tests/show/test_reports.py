"""Reports outlive their process: what JSON has of one reads back as the same report."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tenure
from tenure import LeakRecord, LeakReport, ReportFormatError, adaptive, paging, profiler
from tenure.profiler import (
    LineRecord,
    MemReport,
    RecordsDisplay,
    Snapshot,
    SnapshotDiff,
    TensorRow,
    snapshot,
)

from ..programs import run_program
from .report_samples import CPU, LEAKS, LINES, MEMORY, REPORTS

PUBLIC = {
    value
    for room in (tenure, adaptive, paging, profiler)
    for value in vars(room).values()
    if isinstance(value, type) and hasattr(value, "from_dict") and hasattr(value, "text")
}
WRITTEN = {name: each for name, each in REPORTS.items() if type(each) in PUBLIC - {Snapshot}}
report_of_each_kind = pytest.mark.parametrize("report", WRITTEN.values(), ids=WRITTEN)


def read_again(report):
    return type(report).from_dict(json.loads(json.dumps(report.to_dict())))


@report_of_each_kind
def test_what_was_written_reads_as_the_same_report(report):
    again = read_again(report)
    assert (str(again), repr(again)) == (str(report), repr(report))
    assert again._repr_html_() == report._repr_html_()
    assert again.to_dict() == report.to_dict()
    assert again == report


@report_of_each_kind
def test_it_says_what_it_is(report):
    facts = report.to_dict()
    assert facts["format"] == f"tenure.{type(report).__name__}"
    assert facts["version"] == 1


def test_every_public_report_is_held_by_these_tests():
    assert {type(report) for report in WRITTEN.values()} | {Snapshot} == PUBLIC


OTHER_PROCESS = """
import json, sys, torch
from tenure import NewDisposeScope
from tenure.profiler import LineProfiler, MemReporter, snapshot

def work():
    return torch.ones(64).sum()

model = torch.nn.Linear(4, 2, bias=False)
CACHE = []
with NewDisposeScope("step", policy="report") as scope:
    CACHE.append(torch.ones(3))
with LineProfiler(work, device="cpu") as profiler:
    work()
reports = [MemReporter(model).get_stats(), scope.leaks, profiler.display(), snapshot()]
print(json.dumps([[report.to_dict(), str(report)] for report in reports]))
"""


def test_a_report_of_another_process_reads_as_it_was_printed_there():
    done = run_program(OTHER_PROCESS)
    kinds = (MemReport, LeakReport, RecordsDisplay, Snapshot)
    for kind, (facts, text) in zip(kinds, json.loads(done.stdout), strict=True):
        assert str(kind.from_dict(facts)) == text


@pytest.mark.parametrize("error", [float("nan"), float("inf"), float("-inf"), np.float32(0.5), 1])
def test_a_number_that_json_has_no_word_for_is_written_all_the_same(error):
    report = adaptive.SplitReport((2, 1), error, (adaptive.SplitDifference("loss", "", error),))
    strict = json.dumps(report.to_dict(), allow_nan=False)
    assert str(type(report).from_dict(json.loads(strict))) == str(report)


def test_numbers_and_text_of_numpy_are_written_as_plain_ones():
    report = LeakReport(
        (replace(LEAKS.records[0], nbytes=np.int64(3), shape=(np.int32(2),)),), scope=np.str_()
    )
    facts = report.to_dict()
    assert type(facts["scope"]) is str
    assert LeakReport.from_dict(facts) == report
    assert read_again(report) == report


def test_a_leaked_jagged_tensor_is_read_with_its_symbolic_size():
    with tenure.NewDisposeScope("s", policy="report") as scope:
        HISTORY.append(torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged))
    HISTORY.clear()
    assert any(type(n) is str for record in scope.leaks.records for n in record.shape)
    assert read_again(scope.leaks) == scope.leaks


texts = st.text(max_size=8)
numbers = st.integers(-(2**60), 2**60)


@given(
    st.builds(
        LineRecord,
        function=texts,
        line=numbers,
        hits=numbers,
        allocated_bytes=numbers,
        freed_bytes=numbers,
        peak_bytes=numbers,
        device=st.sampled_from([CPU, torch.device("cuda", 1)]),
        exact=st.booleans(),
        peak_exact=st.booleans(),
        source=texts,
        file=texts,
        statistics=st.dictionaries(texts, numbers, max_size=3),
    )
)
def test_a_record_of_a_line_reads_as_the_same_record(record):
    (section,) = LINES.sections
    lines = replace(LINES, sections=(replace(section, rows=((1, "", record),)),))
    assert read_again(lines).records == (record,)


rows = st.builds(
    TensorRow,
    name=texts,
    category=texts,
    shape=st.lists(st.one_of(numbers, texts), max_size=3).map(tuple),
    dtype=texts,
    device=st.just("cpu"),
    n_bytes=numbers,
    owner=st.none() | texts,
    created_at=st.none() | texts,
)


@given(st.builds(SnapshotDiff, numbers, st.lists(rows, max_size=3).map(tuple), st.just(())))
def test_a_difference_of_any_rows_reads_as_the_same(change):
    assert read_again(change) == change


@given(
    st.builds(
        LeakRecord,
        shape=st.lists(numbers, max_size=3).map(tuple),
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]),
        device=st.just(CPU),
        nbytes=numbers,
        created_at=st.none() | texts,
        holders=st.lists(texts, max_size=3).map(tuple),
        kind=texts,
        graph=texts,
    )
)
def test_a_leak_of_any_record_reads_as_the_same(record):
    report = LeakReport((record,), scope="s")
    assert read_again(report) == report


# snapshots

HISTORY = []


def test_a_snapshot_that_was_read_keeps_its_records_and_findings():
    HISTORY.append(torch.ones(4096)[:1])
    taken = snapshot()
    HISTORY.clear()
    again = read_again(taken)
    assert again.records == taken.records
    assert again.findings == taken.findings
    assert str(again) == str(taken)


# what can't be read


def test_memory_without_a_storage_is_compared_by_name_beside_storages():
    there = torch.ones(256)  # or there may be no tensor at all
    (kept,) = (entry for entry in snapshot()._entries[:1])
    del there
    hidden = [replace(kept, identity=None)] * 2
    before, now = (Snapshot((kept, *more), MEMORY) for more in ([], hidden))
    assert now.diff(before).new == (kept.owner, kept.owner)
    assert before.diff(now).freed == (kept.owner, kept.owner)


def altered(**changed):
    return json.loads(json.dumps(MEMORY.to_dict())) | changed


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], r"^MemReport\.from_dict\(\) got \[\], which is no report of tenure\. Pass the dict"),
        ({}, r"got {}, which is no report of tenure\. Pass the dictionary that to_dict\(\) gave"),
        (
            altered(format="tenure.Snapshot"),
            r"got 'tenure\.Snapshot', which is another kind of report\. Read it with "
            r"Snapshot\.from_dict\(\)\.$",
        ),
        (
            altered(version=2),
            r"got version 2 of 'tenure\.MemReport', and this tenure knows version 1\. Read it with "
            r"the tenure that wrote it, or update this one\.$",
        ),
        (altered(version="1"), r"got version '1' of"),
        (altered(version=0), r"got version 0 of"),
        (altered(devices="all"), r"^MemReport\.devices is 'all', and no tuple\[.*write it anew\.$"),
        (altered(devices=[{}]), r"^MemReport\.devices\[0\]\.device is missing\. It was cut or"),
        (altered(verbose=1), r"^MemReport\.verbose is 1, and no bool\. "),
    ],
)
def test_what_is_no_such_report_is_refused(data, message):
    with pytest.raises(ReportFormatError, match=message):
        MemReport.from_dict(data)


def test_each_missing_key_is_named():
    facts = read_again(REPORTS["leaks"]).to_dict()
    for key in ("records", "scope"):
        rest = {name: value for name, value in facts.items() if name != key}
        with pytest.raises(ReportFormatError, match=rf"^LeakReport\.{key} is missing\. "):
            LeakReport.from_dict(rest)


@pytest.mark.parametrize(
    ("key", "value"), [("device", "abacus:0"), ("dtype", "float3"), ("dtype", "Tensor")]
)
def test_a_device_or_dtype_that_torch_does_not_know_is_named(key, value):
    facts = json.loads(json.dumps(REPORTS["leaks"].to_dict()))
    facts["records"][1][key] = value
    with pytest.raises(
        ReportFormatError, match=rf"^LeakReport\.records\[1\]\.{key} is '{value}', a {key} that"
    ):
        LeakReport.from_dict(facts)


def test_a_number_that_no_float_can_be_is_refused():
    facts = REPORTS["split"].to_dict() | {"rtol": 10**400}
    with pytest.raises(ReportFormatError, match=r"^SplitReport\.rtol is 1000.*, and no float"):
        adaptive.SplitReport.from_dict(facts)


def test_a_record_without_a_field_is_refused():
    facts = json.loads(json.dumps(LINES.to_dict()))
    del facts["sections"][0]["rows"][1][2]["hits"]
    with pytest.raises(ReportFormatError, match=r"rows\[1\]\[2\]\.hits is missing\. "):
        RecordsDisplay.from_dict(facts)


def test_a_row_of_another_length_is_refused():
    facts = json.loads(json.dumps(LINES.to_dict()))
    facts["sections"][0]["rows"][0].pop()
    with pytest.raises(ReportFormatError, match=r"rows\[0\] has 2 values, and should have 3\. "):
        RecordsDisplay.from_dict(facts)


def test_the_error_is_a_value_error_of_tenure():
    assert issubclass(ReportFormatError, ValueError)
    assert issubclass(ReportFormatError, tenure.TenureError)
