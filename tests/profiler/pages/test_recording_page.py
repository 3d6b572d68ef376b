"""A recording's page has what the recording has, and nothing of what it has not."""

import contextlib
import json
import re

import torch
from torch import nn

from tenure.profiler import (
    DeviceTimeline,
    Growth,
    HostTimeline,
    LineProfiler,
    MemReporter,
    OomMark,
    PeakRow,
    ScopeSpan,
    TimelineReport,
    record_oom,
)
from tenure.scopes import LeakRecord, LeakReport
from tests.profiler.recording.makers import MIB, block, recording, track
from tests.show.pages import assert_stands_alone, read_html


def _timeline():
    stack = ("train.py:9 in main", "model.py:3 in f")
    device = DeviceTimeline(
        "cuda:0",
        times_s=(0.0, 1.0, 2.0),
        live_bytes=(MIB, 8 * MIB, 2 * MIB),
        began_bytes=0,
        peak_bytes=8 * MIB,
        peak_at_s=1.0,
        by_category={"parameters": (MIB, 8 * MIB, 2 * MIB), "inputs": (0, 0, 0)},
        by_scope={"step": (MIB, 8 * MIB, 2 * MIB)},
        by_line={"model.py:3": (MIB, 8 * MIB, 2 * MIB)},
        at_peak=(
            PeakRow("parameters", "step", stack, 3 * MIB, 2),
            PeakRow("parameters", "step", (), 5 * MIB, 0),
        ),
    )
    host = HostTimeline(
        times_s=(0.0, 1.5),
        rss_bytes=(50 * MIB, 90 * MIB),
    )
    return TimelineReport(
        (device,),
        (ScopeSpan("step", 0, 0.0, 2.5),),
        (OomMark(1.0, "CUDA out of memory."),),
        host,
        n_events=4,
        duration_s=3.0,
        began_at_ns=0,
        notes=("Other threads were not seen.",),
    )


def _page(folder, **fields):
    path = recording(**fields).export(folder / "page.html")
    return path.read_text("utf-8")


def _drawings(text):
    (found,) = re.findall(r'<script [^>]*id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found)["drawings"]


def _headings(text):
    return re.findall(r"<h2 [^>]*>(.*?)</h2>", text)


def _record(n_bytes, *holders, graph=""):
    shape, dtype, device = (n_bytes // 4,), torch.float32, torch.device("cpu")
    return LeakRecord(shape, dtype, device, n_bytes, "train.py:4", holders, "global", graph)


def test_a_timeline_is_drawn_device_by_device_and_with_the_host(tmp_path):
    text = _timeline().export(tmp_path / "x.html").read_text("utf-8")
    assert_stands_alone(text, is_drawn=True)
    assert _headings(text) == ["Memory over time", "At the peak"]
    chart, host, flame, places = _drawings(text)
    assert chart["title"] == "cuda:0: 8.0 MiB in use at the peak, after 1.00 s"
    assert [way["name"] for way in chart["ways"]] == ["category", "scope", "line"]
    # what never had a byte is no band
    assert [band["name"] for band in chart["ways"][0]["bands"]] == ["parameters"]
    assert chart["marks"] == [{"at_s": 1.0, "text": "CUDA out of memory."}]
    assert chart["spans"] == {"names": ["step"], "rows": [[0, 0, 0.0, 2.5]]}
    assert host["title"] == "Host: 90.0 MiB resident in the process at most"
    assert host["levels"] == [50 * MIB, 90 * MIB]
    assert [row[1:] for row in flame["rows"]] == [[5 * MIB, 0], [3 * MIB, 2]]
    assert [row[-2:] for row in places["rows"]] == [[None, 5 * MIB], [2, 3 * MIB]]
    assert "Other threads were not seen." in read_html(text)[1]


def test_a_snapshot_has_the_sum_alone(tmp_path):
    levels = track("cpu", MIB, 3 * MIB, at_peak=[block(3 * MIB, "train.py:3 in f")])
    chart = _drawings(_page(tmp_path, tracks=(levels,)))[0]
    assert chart["end"] == levels.times_s[-1]
    assert chart["ways"] == [
        {"name": "memory", "bands": [{"name": "in use", "values": list(levels.live_bytes)}]}
    ]


def test_leaks_stand_with_their_chains_the_largest_first(tmp_path):
    reports = (
        LeakReport([_record(64, "a[0]"), _record(4096, "b", "c.d", graph="loss")], scope="step"),
        LeakReport([], scope="nothing"),
        LeakReport([_record(1024, "e")], scope="epoch"),
    )
    growth = Growth("losses", 2, 8, 0, 4 * MIB, first_step=2, last_step=8)
    text = _page(tmp_path, leaks=reports, growth=(growth,))
    grown, leaked = _drawings(text)
    assert grown["rows"] == [["losses", 4 * MIB, 6, str(growth)]]
    assert leaked["title"] == "3 tensors leaked, 5.1 KiB"
    assert [row[1:3] for row in leaked["rows"]] == [[4096, "step"], [1024, "epoch"], [64, "step"]]
    assert leaked["rows"][0][-1] == ["b", "c.d", "the graph of loss"]
    assert _headings(text) == ["Leaks and growth"]


def test_lines_stand_as_the_profiler_spells_them(tmp_path):
    def work(n):
        x = torch.ones(n)
        return x * 2

    with LineProfiler(work) as profiler:
        work(1024)
    text = _page(tmp_path, lines=profiler.display())
    assert _headings(text) == ["Source lines"]
    assert "x = torch.ones(n)" in read_html(text)[1]
    assert "4.0 KiB" in read_html(text)[1]


def test_what_was_alive_at_the_end_stands_by_name(tmp_path):
    model = nn.Linear(8, 4)
    memory = MemReporter(model).report()
    text = _page(tmp_path, memory=memory)
    table = _drawings(text)[0]
    names = {row[1]: row[-1] for row in table["rows"]}
    assert names["weight"] == 128
    sizes = [row[-1] for row in table["rows"]]
    assert sizes == sorted(sizes, reverse=True)
    assert _headings(text) == ["At the end"]


def test_how_it_ended_and_why_memory_ran_out_stand_first(tmp_path):
    with record_oom() as recorder, contextlib.suppress(RuntimeError):
        torch.empty(1 << 60)
    text = _page(
        tmp_path,
        ended="torch.OutOfMemoryError: tried to allocate 3 GiB",
        exit_code=1,
        peaks={"cpu": MIB, "cuda:0": 8 * MIB},
        timeline=_timeline(),
        oom=recorder.report,
        notes=("No sizes of xpu:0.",),
    )
    shown = read_html(text)[1]
    assert _headings(text) == ["Out of memory", "Memory over time", "At the peak", "Notes"]
    assert recorder.report.first_line.partition(":")[0] in shown
    assert "No sizes of xpu:0." in shown
    # whose line the page is opened for
    assert "after 1.00 s; of it 3.0 MiB parameters, made at model.py:3 in f" in shown
    facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", text))
    # of a device with a timeline the peak stands once
    assert list(facts) == [
        "peak of cuda:0",
        "ran out of memory",
        "peak of cpu",
        "why memory ran out",
        "ended with",
    ]
    assert facts["ended with"] == "torch.OutOfMemoryError"


def test_nothing_recorded_is_a_page_all_the_same(tmp_path):
    text = _page(tmp_path)
    assert _drawings(text) == []
    assert _headings(text) == []
    assert_stands_alone(text, is_drawn=True)
