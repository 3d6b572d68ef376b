"""Forwards that compute on several streams: what each of them reads is there, and stays there."""

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from tenure.paging import page
from tenure.paging._device import _copies
from tenure.testing import RaceError, Rates

from ..models import WIDTH, Beside, Side

pytestmark = pytest.mark.usefixtures("without_gradients")
SLOW = Rates(memory_bytes_per_s=1e8)


@pytest.mark.parametrize("joins", [True, False])
def test_a_weight_that_is_read_on_another_stream_is_there_and_stays(sim, joins):
    sim(rates=SLOW)
    side = Side(sim)
    model = nn.Sequential(*[Beside(side, joins=joins) for _ in range(6)]).eval()
    weights = [layer.weight.detach().clone() for layer in model]
    x = torch.randn(4, WIDTH, device=sim.device)
    with page(model, sim.device, budget="10KiB", prefetch=1):
        outputs = [model(x) for _ in range(3)]
    assert len({output.cpu().sum().item() for output in outputs}) == 1
    for layer, weight in zip(model, weights, strict=True):
        side.stream.synchronize()
        assert all(torch.equal(seen.cpu(), 2 * weight) for seen in layer.seen)
        layer.seen.clear()


class BesideWhole(nn.Module):
    """Reads and writes what is not paged on streams that nothing joins, each time on another."""

    def __init__(self, *sides):
        super().__init__()
        self.sides = sides
        self.register_buffer("count", TwoTensor(torch.zeros(1000), torch.ones(1000)))
        self.seen = []

    def forward(self, x):
        side = self.sides[len(self.seen) % len(self.sides)]
        with side.module.stream(side.stream):
            if self.training:
                self.count.add_(1)
            self.seen.append(self.count * 2)
        return x


def test_the_old_copy_of_a_changed_tensor_is_let_go_when_no_stream_reads_it(sim):
    sim(rates=SLOW)
    model, x = BesideWhole(Side(sim), Side(sim)).eval(), torch.randn(1, device=sim.device)
    with page(model, sim.device):
        for _ in range(3):
            model(x)
            model.count.add_(1)
        sim.module.synchronize()
        assert [each.a[0].item() for each in model.seen] == [0, 2, 4]
        model.seen.clear()


def test_what_another_stream_has_written_to_one_is_home_after_the_pass(sim):
    sim(rates=SLOW)
    model, x = BesideWhole(Side(sim)).train(), torch.randn(1, device=sim.device)
    with page(model, sim.device):
        for n_passes in (1, 2):
            model(x)
            assert model.count.a.eq(n_passes).all()
            assert model.count.b.eq(n_passes + 1).all()
        model.seen.clear()


@pytest.mark.parametrize(
    "program",
    [
        test_the_old_copy_of_a_changed_tensor_is_let_go_when_no_stream_reads_it,
        test_what_another_stream_has_written_to_one_is_home_after_the_pass,
    ],
)
def test_without_the_wait_for_its_uses_it_is_caught(sim, monkeypatch, program):
    monkeypatch.setattr(_copies.UnpagedTensors, "_await_uses", lambda self, host: None)
    with pytest.raises((RaceError, AssertionError)):
        _run_to_its_end(sim, program)
    sim.take_faults()


def _run_to_its_end(sim, program):
    program(sim)
    sim.finish()


class Behind(nn.Module):
    """Reads its weight on a stream that has much to do before, and computes nothing else."""

    def __init__(self, side):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.side = side

    def forward(self, x):
        with self.side.module.stream(self.side.stream):
            torch.ones(1000, device=x.device)
            self.weight.sum()
        return x


def test_a_report_waits_for_streams_beside_that_of_the_pass(sim, monkeypatch):
    class Strict(sim.module.Event):
        def elapsed_time(self, end):
            if not (self.query() and end.query()):
                raise RuntimeError("Both events must be completed before calculating elapsed time.")
            return super().elapsed_time(end)

    sim(rates=Rates(memory_bytes_per_s=1e6))
    monkeypatch.setattr(sim.module, "Event", Strict)
    model = nn.Sequential(*[Behind(Side(sim)) for _ in range(6)]).eval()
    x = torch.randn(4, WIDTH, device=sim.device)
    with page(model, sim.device, budget="10KiB") as handle:
        for _ in range(2):
            model(x)
            handle.report()


def test_only_what_is_measured_has_events_with_a_time(sim, monkeypatch):
    made = []

    def make(enable_timing=False):
        made.append(enable_timing)
        return event_class(enable_timing=enable_timing)

    event_class = sim.module.Event
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)]).eval()
    x = torch.randn(4, WIDTH, device=sim.device)
    with page(model, sim.device, budget="15KiB") as handle:
        for _ in range(2):
            model(x)
        monkeypatch.setattr(sim.module, "Event", make)
        model(x)
        last = handle._pager.engine.meter.last
    n_timed = 2 * (1 + len(last.stalls)) + 2 * len(last.copies)
    assert made.count(True) == n_timed
    assert made.count(False) > 0
