"""Forwards that compute on several streams: what each of them reads is there, and stays there."""

import pytest
import torch
from torch import nn

from tenure.paging import page
from tenure.testing import Rates

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
