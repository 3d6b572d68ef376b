"""What graphs save waits on the host: the same gradients, less memory, each storage copied once."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tenure.paging import page
from tenure.profiler import MemReporter
from tenure.testing import Rates

from .blocks import LARGE, WIDTH, inputs, mlp


class Saving(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        a, b, c = self.inner(x).chunk(3, dim=-1)
        a = a.transpose(0, 1).contiguous().transpose(0, 1)
        return (a * b).sum() + (b * c.exp()).sum() + (c.flip(0) * a).sum() + (c * c).sum()


@pytest.mark.parametrize("activations", [None, "host"])
def test_an_error_out_of_memory_says_what_comes_on_top_of_the_budget(sim, activations):
    model = mlp()
    x = torch.randn(4096, WIDTH)

    def train():
        with page(model, sim.device, budget="1MiB", training=True, activations=activations):
            sim(budget=sim.allocated_bytes + x.nbytes)
            model(x).sum().backward()

    with pytest.raises(torch.OutOfMemoryError) as caught:
        train()
    (note,) = caught.value.__notes__
    assert "Activations and gradients come on top of its budget: lower budget=" in note
    assert ('activations="host"' in note) == (activations is None)


def test_a_storage_that_is_saved_several_times_is_copied_once(sim, pair):
    both = pair(Saving())
    x = inputs(sim, 1, LARGE)[0]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = both.there(x)
    own = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in saved}
    unmoved = {p.untyped_storage()._cdata for p in both.there.parameters()}
    expected = sum(n_bytes for key, n_bytes in own.items() if key not in unmoved)
    assert len(saved) > len(own) + 2
    loss = saved.clear()
    with both.page(2, activations="host"):
        before_bytes = sim.copied_bytes("d2h")
        loss = both.host(x)
        assert sim.copied_bytes("d2h") - before_bytes == expected
        loss.backward()
        both.there(x).backward()
        assert both.gradients_differ() == []


class Looking(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.form = x.shape, x.stride(), x.storage_offset()
        return x.sum()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        assert (x.shape, x.stride(), x.storage_offset()) == ctx.form
        return (gradient * x).contiguous()


class Forms(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        forms = y, y.transpose(0, 2), y[:, 1:, ::2], y[0:1].expand(128, -1, -1)
        return sum(map(Looking.apply, forms))


class WrittenThroughData(nn.Module):
    """Writes by a counter of versions that is not the saved tensor's."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.rest = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())] * 4)

    def forward(self, x):
        kept = F.relu_(self.first(x))  # version 1, which the node saves
        written = kept.data
        torch.accelerator.synchronize(x.device)
        written.mul_(2.0)  # version 1 as well, of a counter of its own
        return self.rest(kept + written * self.weight)


@pytest.mark.parametrize("make", [lambda: Forms(WIDTH, WIDTH), WrittenThroughData])
def test_views_keep_their_form_and_another_tensors_version_is_not_taken_for_its_own(
    sim, pair, make
):
    both = pair(make())
    with both.page(2, activations="host"):
        both.train(*inputs(sim, 2, LARGE))


@pytest.mark.parametrize("halved", ["host"], indirect=True)
def test_host_memory_is_pinned_and_that_of_the_largest_batch_used_again(sim, halved):
    told = []
    for n_samples in (200, 70, 160, 199):
        halved.host.zero_grad()
        halved.host(inputs(sim, 1, n_samples)[0]).sum().backward()
        told.append(halved.handle.report())
        assert told[-1].pinned_bytes == told[-1].host_bytes
    assert told[0].host_bytes == told[-1].host_bytes
    assert told[0].host_bytes > 2 * halved.weight_bytes
    categories = MemReporter(halved.host).report(verbose=False).categories
    away_bytes = categories["paged: activations"]
    assert 0 < away_bytes < told[-1].host_bytes - halved.weight_bytes


class Beside(nn.Module):
    """Saves on a side stream what was made on the stream around the forward."""

    def __init__(self, sim, side, *, records):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.rest = nn.ModuleList([nn.Linear(64, 64) for _ in range(4)])
        self.sim, self.side, self.records = [sim], [side], records

    def forward(self, x):
        (sim,), (side,), total = self.sim, self.side, 0.0
        current = sim.module.current_stream()
        for factor in range(1, 5):
            made = torch.full((256, 64), float(factor), device=x.device)
            if self.records:
                made.record_stream(side)
            side.wait_stream(current)
            with sim.module.stream(side):
                total = (made * self.weight).sum() + total
            current.wait_stream(side)
            del made
        return total


@pytest.mark.parametrize("records", [True, False])
def test_what_is_saved_on_a_side_stream(sim, records):
    sim(rates=Rates(d2h_bytes_per_s=1e6))
    model = Beside(sim, sim.module.Stream(), records=records)
    x = torch.ones(1, device=sim.device)
    with page(model, sim.device, budget="1MiB", training=True, activations="host"):
        for _ in range(2):
            model.zero_grad()
            loss = model(x)
            assert sim.take_faults() == []
            loss.backward()
            # What the nodes read on the side stream is nobody's to wait for but the program's.
            assert not (sim.take_faults() and records)
    assert model.weight.grad.tolist() == [2560.0] * 64
