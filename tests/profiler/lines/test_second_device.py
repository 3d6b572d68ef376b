"""What is asked of the second device is asked there, and leaves no trace on the first."""

import gc
import io
from contextlib import redirect_stdout

import pytest
import torch
from torch import nn

from tenure.profiler import Courtesy, LineProfiler, MemReporter


@pytest.fixture
def two(sim):
    """Two devices, of which the first is the current one."""
    gc.collect()  # what earlier tests left on the first device would be moved from there
    sim(devices=2, allocator="cuda")
    yield sim
    assert sim.contexts == {1}
    assert sim.n_allocations == 0
    assert sim.module.current_device() == 0


@pytest.mark.parametrize("device", [None, "sim:1"])
def test_a_courtesy_empties_the_second_device_and_fills_it_again(two, device):
    net = nn.Linear(16, 16).to("sim:1")
    values, held_bytes = net.weight.tolist(), two.on(1).allocated_bytes
    with Courtesy(device):
        assert two.on(1).reserved_bytes == 0
    assert two.on(1).allocated_bytes == held_bytes
    assert net.weight.tolist() == values


def test_a_courtesy_for_the_first_device_leaves_the_second_alone(two):
    net = nn.Linear(16, 16).to("sim:1")
    held_bytes = two.on(1).allocated_bytes
    with Courtesy("sim:0") as courtesy:
        assert two.on(1).allocated_bytes == held_bytes
        assert courtesy.report.moved_bytes == 0
    assert net.weight.device == torch.device("sim", 1)


def test_lines_are_charged_with_the_device_that_is_named(two):
    def work(n):
        a = torch.ones(n, dtype=torch.uint8, device="sim:1")
        return a.sum().item()

    profiler = LineProfiler(work, target_gpu=1)
    with profiler:
        work(4096)
    first = min(profiler.records, key=lambda record: record.line)
    assert (str(first.device), first.net_bytes) == ("sim:1", 4096)


def test_a_report_tells_of_the_second_device_alone(two):
    net = nn.Linear(16, 16).to("sim:1")
    shown = io.StringIO()
    with redirect_stdout(shown):
        report = MemReporter(net).report(device="sim:1")
        MemReporter(net).report()
    assert (report.total_bytes, report.unexplained_bytes) == (two.on(1).allocated_bytes, 0)
    assert "The allocated memory on sim:1" in shown.getvalue()
    assert "sim:0" not in shown.getvalue()
