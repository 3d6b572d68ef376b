"""The examples of pytorch_memlab's README and its tests of Courtesy, restated: each one runs."""

import gc
import re

import pytest
import torch
from torch import nn

from tenure.profiler import (
    Courtesy,
    LineProfiler,
    MemReporter,
    clear_global_line_profiler,
    profile,
    profile_every,
    saved_for_backward,
    set_target_device,
    set_target_gpu,
)
from tenure.profiler._lines._decorators import _profiler

WEIGHT_BYTES = 128 * 128 * 4 + 128 * 4  # of the layers below, in whole 512 B
PAGE = 1 << 20


@pytest.fixture(params=["cpu", pytest.param("accelerator", marks=pytest.mark.simdevice)])
def device(request):
    if request.param == "cpu":
        return torch.device("cpu")
    return request.getfixturevalue("sim").device


@pytest.fixture(autouse=True)
def _alone():
    """Let earlier tests' garbage go before, and what the decorators began afterwards."""
    gc.collect()
    yield
    clear_global_line_profiler()
    _profiler().disable()


def layer(device):
    return nn.Linear(128, 128, device=device)


def net_bytes(profiler, function):
    return [r.net_bytes for r in profiler.records if r.function.endswith(function)]


def test_two_functions_are_profiled_line_by_line(device):
    def inner():
        layer(device)

    def outer():
        first = layer(device)
        second = layer(device)
        inner()
        return first, second

    with LineProfiler(outer, inner, device=device) as profiler:
        kept = outer()
    assert net_bytes(profiler, "outer") == [WEIGHT_BYTES, WEIGHT_BYTES, 0, 0]
    assert net_bytes(profiler, "inner") == [0]
    (inner_line,) = (r for r in profiler.records if r.function.endswith("inner"))
    assert inner_line.allocated_bytes >= WEIGHT_BYTES
    text = str(profiler.display())
    assert text.index("outer") < text.index("def inner()")
    del kept


def test_the_decorator_on_a_method_prints_every_so_many_calls(device, capsys):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = layer(device)

        @profile_every(2)
        def forward(self, x):
            return self.inside(x)

    set_target_device(device)
    net = Net()
    net(torch.ones(1, 128, device=device))
    assert capsys.readouterr().out == ""
    net(torch.ones(1, 128, device=device))
    assert "return self.inside(x)" in capsys.readouterr().out


def test_the_target_can_be_switched_inside_a_profiled_function(sim, monkeypatch):
    monkeypatch.setattr("atexit.register", lambda *_: None)  # what it would print at the end

    @profile
    def work():
        first = layer(sim.device)
        set_target_device("cpu")
        second = layer("cpu")
        set_target_gpu(0)
        third = layer(sim.device)
        return first, second, third

    set_target_gpu(0)
    kept = work()
    found = {(r.source.split(" = ")[0].strip(), str(r.device)): r for r in _profiler().records}
    assert found["first", "sim:0"].net_bytes == WEIGHT_BYTES
    assert found["second", "cpu"].net_bytes == WEIGHT_BYTES
    assert found["third", "sim:0"].net_bytes == WEIGHT_BYTES
    del kept


def reported(capsys, reporter, **options):
    reporter.report(**options)
    return capsys.readouterr().out


def test_a_report_without_a_model(device, capsys):
    linear = nn.Linear(1024, 1024, device=device)
    text = reported(capsys, MemReporter())
    _, on_device = text.split(f"Storage on {device}\n")
    assert "(1024, 1024)   4.0 MiB" in on_device
    assert "(1024,)   4.0 KiB" in on_device
    del linear


def test_a_report_names_parameters_and_gradients_before_and_after_backward(sim, capsys):
    linear = nn.Linear(1024, 1024, device=sim.device)
    batch = torch.empty(512, 1024, device=sim.device)
    reporter = MemReporter(linear)
    out = linear(batch).mean()
    before = reported(capsys, reporter, device=sim.device)
    assert "weight.grad" not in before
    out.backward()
    after = reported(capsys, reporter, device=sim.device)
    for name in ("weight", "bias", "weight.grad", "bias.grad"):
        assert sum(line.split("(")[0].split()[:1] == [name] for line in after.splitlines()) == 1


def test_a_shared_weight_is_counted_once(sim, capsys):
    first, second = (nn.Linear(1024, 1024, device=sim.device) for _ in range(2))
    second.weight = first.weight
    model = nn.Sequential(first, second)
    report = MemReporter(model).report(verbose=True, device=sim.device)
    assert report.total_bytes == report.categories["parameters"] == sim.allocated_bytes
    assert sim.allocated_bytes == 4 * PAGE + 2 * 4096
    assert "0.weight+1.weight  " in capsys.readouterr().out


def test_what_only_autograd_holds_is_found(sim):
    linear = nn.Linear(1024, 1024, device=sim.device)
    batch = torch.ones(512, 1024, device=sim.device)
    held_bytes = sim.requested_bytes
    out = linear(batch * (batch + 2)).mean()
    product_bytes = sim.requested_bytes - held_bytes - out.nbytes
    assert product_bytes == 2 * PAGE
    assert saved_for_backward(out).total_bytes >= product_bytes


# --- Courtesy


def training(device):
    linear = nn.Linear(64, 64, device=device)
    out = linear(torch.ones(32, 64, device=device)).mean()
    out.backward()
    return linear, out


def test_a_task_yields_waits_and_goes_on(sim):
    linear, out = training(sim.device)
    held_bytes = sim.allocated_bytes
    courtesy = Courtesy()
    for _ in range(2):
        courtesy.yield_memory()
        assert sim.allocated_bytes == 0  # another task has the device here
        courtesy.restore()
        assert sim.allocated_bytes == held_bytes
    assert linear(torch.ones(1, 64, device=sim.device)).shape == (1, 64)
    del out


def test_a_report_can_be_made_before_meanwhile_and_after(sim, capsys):
    linear, out = training(sim.device)
    reporter = MemReporter(linear)
    before = reported(capsys, reporter)
    courtesy = Courtesy()
    courtesy.yield_memory()
    meanwhile = reported(capsys, reporter)
    courtesy.restore()
    # where the free parts of segments lie is the allocator's affair
    segments = re.compile(r"largest block [^;]*")
    assert segments.sub("", reported(capsys, reporter)) == segments.sub("", before)
    assert ("Storage on sim:0" in before, "Storage on sim:0" in meanwhile) == (True, False)
    del out


def test_a_report_can_be_made_inside_the_block(sim, capsys):
    linear, out = training(sim.device)
    reporter = MemReporter(linear)
    with Courtesy():
        report = reporter.report(device=sim.device)
        assert report.total_bytes == sim.allocated_bytes == 0
    assert capsys.readouterr().out
    del out


def test_without_an_accelerator_the_examples_change_nothing():
    linear, out = training("cpu")
    before = linear.weight.tolist()
    with Courtesy() as courtesy:
        assert linear.weight.tolist() == before
    assert courtesy.report.moved_bytes == 0
    del out
