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
from tenure._show import Column, Report, Table
from tenure.profiler import (
    CourtesyReport,
    DeviceReport,
    DeviceTimeline,
    Finding,
    Growth,
    HostTimeline,
    LineProfiler,
    LineRecord,
    MemReport,
    OomLine,
    OomMark,
    OomReport,
    PeakRow,
    RecordedRanks,
    Recording,
    RecordingDiff,
    RecordsDisplay,
    SavedRecord,
    SavedReport,
    ScopeSpan,
    Snapshot,
    SnapshotDiff,
    Stay,
    TensorRow,
    TimelineReport,
    snapshot,
)

from ..programs import run_program

CPU = torch.device("cpu")
ROW = TensorRow("f.<locals>.x", "other tensors", (2, "s0"), "float32", "cpu", 8, None, "a.py:3")
VIEW = TensorRow("y", "buffers", (1,), "float32", "cpu", 0, "f.<locals>.x")
DEVICE = DeviceReport(
    "cpu", (ROW, VIEW), {"other tensors": 8, "buffers": 0}, 10, True, 20, 30, 4, 5
)
MEM = MemReport((DEVICE,), verbose=True)
LEAK = LeakRecord((3,), torch.float16, torch.device("cuda:0"), 6, None, ("a", "b"), "global", "g")
SAVED = SavedRecord((2,), torch.int64, CPU, 16, ("MulBackward0.self",), "a.py:7", is_leaf=True)


def work(n):
    x = torch.ones(n)
    return x.sum()


def lines():
    with LineProfiler(work, device="cpu") as profiler:
        work(64)
    return profiler


def paging_report(**changed):
    facts = {
        "passes": 3, "pass_s": 0.25, "stall_s": 0.05, "compute_s": 0.2, "bytes_per_pass": 4096,
        "link_bytes_per_s": 2e9, "faults": 1, "total_faults": 2, "share_of_limit": 0.9,
        "bound": "link", "helpful_budget_bytes": None, "resident_bytes": 10, "ring_bytes": 20,
        "allocated_bytes": 30, "reserved_bytes": 40, "staging_bytes": 5, "host_bytes": 6,
        "pinned_bytes": 7,
    }  # fmt: skip
    return paging.PagingReport(**(facts | changed))


def peak_report(**changed):
    facts = {
        "peak_bytes": 7000, "baseline_bytes": 4000, "categories": {"parameters": 7000},
        "phase": "backward", "operation": "aten.mm.default", "place": "a.b (a.py:3)",
        "device": "cpu", "approximate": False, "reasons": (),
    }  # fmt: skip
    return adaptive.PeakReport(**(facts | changed))


def timeline_report():
    peak = PeakRow("gradients", "<DisposeScope 'step'>", ("train.py:3 in step",), 9, 2)
    bands = {"gradients": (4, 9), "temporary or unexplained": (0, 1)}
    device = DeviceTimeline(
        "cpu",
        (0.0, 0.5),
        (4, 10),
        10,
        0.5,
        (peak,),
        4,
        bands,
        {"step": (4, 10)},
        {"a.py:3": (4, 10)},
    )
    return TimelineReport(
        (device,),
        (ScopeSpan("step", 0, 0.0, 0.4),),
        (OomMark(0.5, "no room"),),
        HostTimeline((0.0,), (10,)),
        7,
        1.0,
        5,
        ("x",),
    )


def oom_report():
    line = OomLine("losses", 10, 2, "float32[5] on cpu")
    return OomReport(
        "leak", "A leak: losses.", ("10 B",), "torch.OutOfMemoryError: no", "a.py:3 in f", "cpu", 4,
        None, 2, 10, {"gradients": 4}, (line,), (line,), {}, {"rss_bytes": 3, "free_bytes": 4},
    )  # fmt: skip


def recording(**changed):
    facts = {
        "command": ("python", "train.py"), "began_at": "2026-01-01T00:00:00+00:00",
        "duration_s": 2.0, "ended": "exit code 0", "exit_code": 0, "versions": {"torch": "2"},
        "peaks": {"cpu": 10}, "growth": (GROWTH,), "memory": MEM,
    }  # fmt: skip
    return Recording(**(facts | changed))


GROWTH = Growth("losses", 1, 4, 4, 16, 1, 4)
WITH_TIMELINE = recording(timeline=timeline_report(), oom=oom_report(), rank=0)

REPORTS = {
    "timeline": timeline_report(),
    "out of memory": oom_report(),
    "recording": recording(),
    "recording with a timeline": WITH_TIMELINE,
    "recordings of ranks": RecordedRanks.of([WITH_TIMELINE, recording(rank=1)]),
    "difference of recordings": RecordingDiff.of(recording(), WITH_TIMELINE),
    "tree": WITH_TIMELINE.tree(),
    "recorded leaks": WITH_TIMELINE.leaks_found(),
    "leaks": LeakReport((LEAK, replace(LEAK, nbytes=8)), scope="<DisposeScope 'step'>"),
    "no leaks": LeakReport((), scope="s"),
    "memory": MEM,
    "saved": SavedReport((SAVED,), 4),
    "difference": SnapshotDiff(
        7, (ROW,), (VIEW,), ((ROW, VIEW),), (Finding("view", "x", "x is large", 4),), {"cpu": 7}
    ),
    "lines": lines().display(),
    "no lines": LineProfiler().display(),
    "paging": paging_report(),
    "paging with a budget": paging_report(helpful_budget_bytes=4096, bound="compute"),
    "courtesy": CourtesyReport(4, 1, 2, (Stay("a tensor", 4, "it has slots"),)),
    "split": adaptive.SplitReport(
        (2, 1), 1e-5, (adaptive.SplitDifference("module", "net.1 (BatchNorm1d)", 0.5),)
    ),
    "peak": peak_report(),
    "peak within a budget": peak_report(
        device="cuda:0",
        allocated_bytes=8192,
        reserved_bytes=2**21,
        allowance_bytes=64,
        budget_bytes=2**30,
        approximate=True,
        reasons=("a mask is taken to select everything",),
    ),
    "plan": adaptive.Plan(
        4,
        10,
        (4, 4, 2),
        3_000,
        3_000,
        4_000,
        1_000,
        {"parameters": 900, "gradients": 0},
        "cpu",
        True,
        ("a mask is taken to select everything at a.py:3",),
    ),
}
report_of_each_kind = pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)


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
    rooms = (tenure, adaptive, paging, profiler)
    public = {value for room in rooms for value in vars(room).values() if isinstance(value, type)}
    written = {kind for kind in public if issubclass(kind, Report)} | {LeakReport}
    assert written == {type(report) for report in REPORTS.values()} | {Snapshot}


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
    report = LeakReport((replace(LEAK, nbytes=np.int64(3), shape=(np.int32(2),)),), scope=np.str_())
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
    assert LineRecord.from_dict(json.loads(json.dumps(record.to_dict()))) == record


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
    before, now = (Snapshot((kept, *more), MEM) for more in ([], hidden))
    assert now.diff(before).new == (kept.owner, kept.owner)
    assert before.diff(now).freed == (kept.owner, kept.owner)


def altered(**changed):
    return json.loads(json.dumps(MEM.to_dict())) | changed


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
    facts = lines().records[0].to_dict()
    del facts["hits"]
    with pytest.raises(ReportFormatError, match=r"^LineRecord\.hits is missing\. "):
        LineRecord.from_dict(facts)


def test_a_row_of_another_length_is_refused():
    facts = json.loads(json.dumps(lines().display().to_dict()))
    facts["sections"][0]["rows"][0].pop()
    with pytest.raises(ReportFormatError, match=r"rows\[0\] has 2 values, and should have 3\. "):
        RecordsDisplay.from_dict(facts)


def test_the_error_is_a_value_error_of_tenure():
    assert issubclass(ReportFormatError, ValueError)
    assert issubclass(ReportFormatError, tenure.TenureError)


# how a table looks


def test_a_column_that_is_empty_everywhere_is_left_out_unless_it_is_fixed():
    columns = [Column("a"), Column("b", ">"), Column("c", ">", is_fixed=True)]
    table = Table("title", columns, [("x", "", ""), ("yy", "", "")])
    assert table.text() == "title\na   c\n--  -\nx\nyy"
