"""Records of many numbers print in a line or two: in a debugger, a failed test, a notebook."""

import pytest
import torch
from torch import nn

from tenure.paging import plan_paging
from tenure.profiler import Branch, HostTimeline, RecordedTree, Timeline, snapshot


@pytest.mark.parametrize(
    ("record", "shown"),
    [
        (HostTimeline((1, 2.5, None), ()), "times_s=(1, 2.5, None), rss_bytes=()"),
        (HostTimeline((0,) * 3, {"cpu": 1}), "times_s=(0, 0, 0), rss_bytes={'cpu': 1}"),
        (HostTimeline((0,) * 4, {"cpu": (1, 2)}), "times_s=<4 items>, rss_bytes=<1 item>"),
        (HostTimeline([HostTimeline((), ())], ()), "times_s=<1 item>, rss_bytes=()"),
    ],
)
def test_what_is_long_is_counted(record, shown):
    assert repr(record) == f"HostTimeline({shown})"


def test_records_of_a_long_run_are_short():
    with Timeline() as timeline:
        kept = [torch.ones(16) for _ in range(300)]
    device = timeline.report.devices[0]
    assert len(device.times_s) > 100
    tree = Branch("x", 300, 300, (Branch("line 1", 1, 1),) * 300)
    assert repr(RecordedTree((tree,))) == "<RecordedTree of 1 device>"
    for record in (device, timeline.report.host, snapshot().report.devices[0], tree):
        assert repr(record).startswith(f"{type(record).__name__}(")
        assert len(repr(record)) < 600, record
    assert "device='cpu', times_s=<" in repr(device)
    assert len(kept) == 300


def test_a_plan_of_many_layers_is_short_and_its_text_is_whole(tmp_path):
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(40)))
    plan = plan_paging(model, "cpu", host=tmp_path)
    assert "units=<20 items>" in repr(plan)
    assert len(repr(plan)) < 600
    assert len(str(plan).splitlines()) > 20
