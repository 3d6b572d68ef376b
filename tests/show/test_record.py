"""Records of many numbers print in a line or two: in a debugger, a failed test, a notebook."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from tenure._show import Record
from tenure.paging import plan_paging
from tenure.profiler import Timeline, snapshot
from tenure.profiler._recording._tree import folded


@dataclass(frozen=True, slots=True, repr=False)
class Sample(Record):
    name: str
    found: object


@pytest.mark.parametrize(
    ("found", "shown"),
    [
        ((1, 2.5, "x"), "(1, 2.5, 'x')"),
        ((), "()"),
        ({"cpu": 1}, "{'cpu': 1}"),
        (tuple(range(4)), "<4 items>"),
        ({"cpu": (1, 2)}, "<1 item>"),
        ([Sample("inner", None)], "<1 item>"),
        (torch.device("cpu"), "device(type='cpu')"),
    ],
    ids=str,
)
def test_what_is_long_is_counted(found, shown):
    assert repr(Sample("all", found)) == f"Sample(name='all', found={shown})"


def test_records_of_a_long_run_are_short():
    with Timeline() as timeline:
        kept = [torch.ones(16) for _ in range(300)]
    device = timeline.report.devices[0]
    assert len(device.times_s) > 100
    (tree,) = folded((("x", f"line {i}", "in f"), 1, 1) for i in range(300))
    records = [device, timeline.report.host, snapshot().report.devices[0], tree]
    for record in (*records, tree.branches[0]):
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
