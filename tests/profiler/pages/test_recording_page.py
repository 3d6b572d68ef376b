"""A recording's page has what the recording has, and nothing of what it has not."""

import contextlib

import torch

from tenure.profiler import (
    DeviceTimeline,
    Growth,
    HostTimeline,
    LineProfiler,
    OomMark,
    PeakRow,
    ScopeSpan,
    TimelineReport,
    record_oom,
)
from tenure.scopes import LeakRecord, LeakReport
from tests.profiler.recording.makers import MIB, recording
from tests.show.pages import assert_stands_alone, read_data, read_html


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


def _record(n_bytes, *holders, graph=""):
    shape, dtype, device = (n_bytes // 4,), torch.float32, torch.device("cpu")
    return LeakRecord(shape, dtype, device, n_bytes, "train.py:4", holders, "global", graph)


def test_a_timeline_is_drawn_device_by_device_and_with_the_host(tmp_path):
    timeline = _timeline()
    text = timeline.export(tmp_path / "x.html").read_text("utf-8")
    assert_stands_alone(text, is_drawn=True)
    drawn = read_data(text)
    assert drawn.keys() == {*timeline.to_dict(), "named", "others"}
    (device,) = drawn["devices"]
    assert device["by_line"] == {"model.py:3": [MIB, 8 * MIB, 2 * MIB]}
    assert [row["n_bytes"] for row in device["at_peak"]] == [3 * MIB, 5 * MIB]
    assert drawn["host"]["rss_bytes"] == [50 * MIB, 90 * MIB]
    assert drawn["ooms"] == [{"at_s": 1.0, "text": "CUDA out of memory."}]
    assert "Other threads were not seen." in read_html(text)[1]


def test_leaks_stand_with_their_chains_the_largest_first(tmp_path):
    reports = (
        LeakReport((_record(64, "a[0]"), _record(4096, "b", "c.d", graph="loss")), scope="step"),
        LeakReport((), scope="nothing"),
        LeakReport((_record(1024, "e"),), scope="epoch"),
    )
    growth = Growth("losses", 2, 8, 0, 4 * MIB, first_step=2, last_step=8)
    text = _page(tmp_path, leaks=reports, growth=(growth,))
    shown = " ".join(read_html(text)[1].split())
    assert str(growth) in shown
    assert all(text in shown for text in ("a[0]", "c.d", "step", "epoch"))
    assert read_data(text)["devices"] == []


def test_lines_stand_as_the_profiler_spells_them(tmp_path):
    def work(n):
        x = torch.ones(n)
        return x * 2

    with LineProfiler(work) as profiler:
        work(1024)
    found = recording(lines=profiler.display())
    shown = [{"alloc", "freed"}.intersection(found.text(width=n).split()) for n in (40, 120)]
    assert shown == [set(), {"alloc", "freed"}]
    text = found.export(tmp_path / "page.html").read_text("utf-8")
    assert "x = torch.ones(n)" in read_html(text)[1]
    assert "4.0 KiB" in read_html(text)[1]


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
    assert recorder.report.first_line.partition(":")[0] in shown
    assert "No sizes of xpu:0." in shown
    assert "cuda:0 after 1.0 s: 3.0 MiB parameters, made at model.py:3 in f" in shown
    at = [shown.index(part) for part in ("OutOfMemoryError", "Out of memory", "At most", "Notes")]
    assert at == sorted(at)
