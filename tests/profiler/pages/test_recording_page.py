"""A recording's page has what the recording has, and nothing of what it has not."""

import json
import re
from types import SimpleNamespace

import torch
from torch import nn

from tenure._show import Paragraph, Shown
from tenure.profiler import LineProfiler, MemReporter
from tenure.profiler._pages import recording_page, timeline_page
from tenure.scopes import LeakRecord, LeakReport
from tests.show.pages import assert_stands_alone, read_html

from .stand_ins import MIB, Grown, timeline


def _drawings(text):
    (found,) = re.findall(r'<script [^>]*id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found)["drawings"]


def _headings(text):
    return re.findall(r"<h2 [^>]*>(.*?)</h2>", text)


def _record(n_bytes, *holders, graph=""):
    shape, dtype, device = (n_bytes // 4,), torch.float32, torch.device("cpu")
    return LeakRecord(shape, dtype, device, n_bytes, "train.py:4", holders, "global", graph)


def test_a_timeline_is_drawn_device_by_device_and_with_the_host():
    text = timeline_page(timeline())
    assert_stands_alone(text, is_drawn=True)
    assert _headings(text) == ["Memory over time", "At the peak"]
    chart, host, flame, places = _drawings(text)
    assert chart["title"] == "cuda:0: 8.0 MiB in use at the peak, after 1.00 s"
    assert [way["name"] for way in chart["ways"]] == ["category", "scope", "line"]
    # what never had a byte is no band
    assert [band["name"] for band in chart["ways"][0]["bands"]] == ["parameters"]
    assert chart["marks"] == [{"at_s": 1.0, "text": "CUDA out of memory."}]
    assert chart["spans"] == {"names": ["step"], "rows": [[0, 0, 0.0, 2.5]]}
    bands = {band["name"]: band["values"] for band in host["ways"][0]["bands"]}
    # more was given out than was written to: resident is what counts
    assert bands["tensors"] == [MIB, 69 * MIB]
    assert [sum(values) for values in zip(*bands.values(), strict=True)] == host["levels"]
    assert [row[1:] for row in flame["rows"]] == [[5 * MIB, 0], [3 * MIB, 2]]
    assert [row[-2:] for row in places["rows"]] == [[None, 5 * MIB], [2, 3 * MIB]]
    assert "Other threads were not seen." in read_html(text)[1]


def test_a_snapshot_has_the_sum_alone():
    (device,) = timeline().devices
    track = SimpleNamespace(
        **{name: value for name, value in vars(device).items() if not name.startswith("by_")}
    )
    chart = _drawings(recording_page("snapshot.pickle", tracks=(track,)))[0]
    assert chart["end"] == 2.0
    assert chart["ways"] == [
        {"name": "memory", "bands": [{"name": "in use", "values": list(device.live_bytes)}]}
    ]


def test_leaks_stand_with_their_chains_the_largest_first():
    reports = [
        LeakReport([_record(64, "a[0]"), _record(4096, "b", "c.d", graph="loss")], scope="step"),
        LeakReport([], scope="nothing"),
        LeakReport([_record(1024, "e")], scope="epoch"),
    ]
    text = recording_page("train.py", leaks=reports, growth=[Grown()])
    grown, leaked = _drawings(text)
    assert grown["rows"] == [["losses", 4 * MIB, 6, "losses grew by 4.0 MiB in 6 steps."]]
    assert leaked["title"] == "3 tensors leaked, 5.1 KiB"
    assert [row[1:3] for row in leaked["rows"]] == [[4096, "step"], [1024, "epoch"], [64, "step"]]
    assert leaked["rows"][0][-1] == ["b", "c.d", "the graph of loss"]
    assert _headings(text) == ["Leaks and growth"]


def test_lines_stand_as_the_profiler_spells_them():
    def work(n):
        x = torch.ones(n)
        return x * 2

    with LineProfiler(work) as profiler:
        work(1024)
    display = profiler.display()
    (table,) = _drawings(recording_page("train.py", lines=display))
    headings = [column["heading"] for column in table["columns"]]
    assert headings == ["line", "code", "hits", "allocated", "freed", "net", "peak"]
    first, ones, twice = table["rows"]
    assert first[2:] == [None] * 5
    assert ones[1].strip() == "x = torch.ones(n)"
    assert ones[3] == [4096, "4.0 KiB"]
    assert twice[5][0] == twice[3][0] - twice[4][0]


def test_what_was_alive_at_the_end_stands_by_name():
    model = nn.Linear(8, 4)
    memory = MemReporter(model).report()
    text = recording_page("train.py", memory=memory)
    table = _drawings(text)[0]
    names = {row[1]: row[-1] for row in table["rows"]}
    assert names["weight"] == 128
    sizes = [row[-1] for row in table["rows"]]
    assert sizes == sorted(sizes, reverse=True)
    assert _headings(text) == ["At the end"]


def test_how_it_ended_and_why_memory_ran_out_stand_first():
    class Oom(Shown):
        first_line = "Batch too large: it has 64. Take 32."
        evidence = ("Autograd saved 30.0 MiB.",)

        def _parts(self):
            return [Paragraph("created at", "train.py:4")]

    text = recording_page(
        "python <train.py>",
        told="2026-11-23",
        ended="torch.OutOfMemoryError: tried to allocate 3 GiB",
        failed=True,
        peaks={"cpu": MIB, "cuda:0": 8 * MIB},
        timeline=timeline(),
        oom=Oom(),
        notes=["No sizes of xpu:0."],
    )
    shown = read_html(text)[1]
    assert _headings(text) == ["Out of memory", "Memory over time", "At the peak", "Notes"]
    assert "Batch too large: it has 64. Take 32." in shown
    assert "Autograd saved 30.0 MiB." in shown
    assert "train.py:4" in shown
    assert "No sizes of xpu:0." in shown
    # whose line the page is opened for
    assert "after 1.00 s; of it 3.0 MiB parameters, made at model.py:3 in f" in shown
    facts = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", text)
    assert facts == [
        ("peak of cuda:0", "8.0 MiB"),
        ("ran out of memory", "1 time"),
        # of a device with a timeline it stands once
        ("peak of cpu", "1.0 MiB"),
        ("why memory ran out", "Batch too large"),
        ("ended with", "torch.OutOfMemoryError"),
    ]


def test_nothing_recorded_is_a_page_all_the_same():
    text = recording_page("train.py", ended="exit code 0")
    assert _drawings(text) == []
    assert _headings(text) == []
    assert_stands_alone(text, is_drawn=True)
