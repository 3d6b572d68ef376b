"""What graphs save waits on the host: the same gradients, less memory, each storage copied once."""

import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tenure.paging import PagingError, page
from tenure.profiler import MemReporter
from tenure.testing import Rates

from .blocks import LARGE, WIDTH
from .blocks import inputs as inputs_of

on_host = pytest.mark.parametrize("halved", ["host"], indirect=True)


def inputs(sim, n_steps=3, n_samples=LARGE):
    return inputs_of(sim, n_steps, n_samples)


class Tanhs(nn.Module):
    """Each layer saves its input, which is what the one before it has saved as its output."""

    def __init__(self, n_layers=12):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(n_layers)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def away_bytes(model):
    categories = MemReporter(model).report(verbose=False).categories
    return categories.get("paged: activations", 0)


def test_the_peak_is_that_of_a_few_activations(sim, pair):
    both = pair(Tanhs())
    x = torch.randn(64 * 1024, WIDTH, device=sim.device)  # 8 MiB, as each activation is
    taken = {}
    for activations in (None, "host"):
        with both.page(activations=activations):
            for _ in range(2):
                before_bytes = sim.allocated_bytes
                sim.reset_peak()
                both.host(x).sum().backward()
                taken[activations] = (sim.peak_bytes - before_bytes) / x.nbytes
                assert sim.allocated_bytes == before_bytes
    # of the layers the outputs, and in the backward pass a gradient or two
    assert taken[None] > 12.9
    assert taken["host"] < 5.1


def test_a_storage_that_is_saved_several_times_is_copied_once(sim, pair):
    class Saving(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x):
            a, b, c = self.inner(x).chunk(3, dim=-1)
            a = a.transpose(0, 1).contiguous().transpose(0, 1)
            return (a * b).sum() + (b * c.exp()).sum() + (c.flip(0) * a).sum() + (c * c).sum()

    both = pair(Saving())
    x = inputs(sim)[0]
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


def test_a_part_of_a_large_storage_is_copied_alone(sim, pair):
    class Slicing(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide, self.narrow = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.narrow(self.wide(x)[-20:])

    both = pair(Slicing())
    x = inputs(sim)[0]
    with both.page(2, activations="host"):
        before_bytes = sim.copied_bytes("d2h")
        loss = both.host(x).sum()
        assert sim.copied_bytes("d2h") - before_bytes == x.nbytes + x[-20:].nbytes
        loss.backward()
        both.there(x).sum().backward()
        assert both.gradients_differ() == []


def test_small_ones_stay(sim, pair):
    both = pair(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Flatten(), nn.Linear(5 * WIDTH, 2)))
    with both.page(2, activations="host"):
        before_bytes = sim.copied_bytes("d2h")
        loss = both.host(inputs(sim, n_samples=8)[0]).sum()
        assert sim.copied_bytes("d2h") == before_bytes
        loss.backward()


def test_views_keep_their_form(sim, pair):
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

    class Forms(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            y = self.linear(x)
            forms = y, y.transpose(0, 2), y[:, 1:, ::2], y[0:1].expand(128, -1, -1)
            return sum(map(Looking.apply, forms))

    both = pair(Forms())
    with both.page(2, activations="host"):
        for x in inputs(sim):
            both.run(lambda model, x=x: model(x).backward())
            assert both.gradients_differ() == []


def test_one_that_is_written_in_place_within_the_model_raises(sim, pair):
    class Writing(Tanhs):
        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(layer(x))
                sim.module.synchronize()
                x.mul_(2)
            return x

    both = pair(Writing())
    x = inputs(sim)[0]
    with both.page(activations="host"):
        loss = both.host(x).sum()
        with pytest.raises(RuntimeError, match=r"float32\[128, 5, 32\] on sim:0.*is at version 1;"):
            loss.backward()


def test_writes_in_place_before_a_save_are_seen(sim, pair):
    class Writing(Tanhs):
        def forward(self, x):
            for layer in self.layers:
                x = F.relu_(layer(x)) * 2
            return x

    both = pair(Writing())
    with both.page(activations="host"):
        for x in inputs(sim):
            both.run(lambda model, x=x: model(x).square().sum().backward())
            assert both.gradients_differ() == []


@pytest.mark.exhaustive
def test_an_error_between_leaves_nothing_behind(sim, pair):
    both = pair()
    x = inputs(sim)[0]
    with both.page(activations="host"):
        both.host(x).sum().backward()
        before_bytes = sim.allocated_bytes
        handle = both.host[3].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            both.host(x)
        handle.remove()
        handle = both.host[2].up.weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            both.host(x).sum().backward()
        handle.remove()
        gc.collect()
        # autograd's thread takes this up when it has let go of the pass that failed
        torch.ones(1, device=sim.device, requires_grad=True).sum().backward()
        assert sim.allocated_bytes == before_bytes
        both.host.zero_grad()
        both.run(lambda model: model(x).sum().backward())
        assert both.gradients_differ() == []


class _WrittenThroughData(nn.Module):
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


def test_a_number_of_writes_that_is_another_tensor_s_is_not_taken_for_the_same_bytes(sim, pair):
    both = pair(_WrittenThroughData())
    x = inputs(sim)[0]
    with both.page(1.5, activations="host"):
        both.run(lambda model: model(x).square().sum().backward())
        assert both.gradients_differ() == []


@pytest.mark.parametrize("where", ["around", "inside"])
def test_hooks_of_the_users_own_come_first(sim, pair, where):
    packed = []

    def own():
        return torch.autograd.graph.saved_tensors_hooks(
            lambda t: packed.append(t.shape) or t.cpu(), lambda t: t.to(sim.device)
        )

    class Hooked(Tanhs):
        def forward(self, x):
            with own():
                x = self.layers[0](x).exp()
            return super().forward(x)

    both = pair(Tanhs() if where == "around" else Hooked())

    def run(model):
        x = inputs(sim)[0]
        if where == "inside":
            loss = model(x).sum()
        else:
            with own():
                loss = model(x).sum()
        loss.backward()

    with both.page(activations="host"):
        run(both.host)
        assert packed
        assert (away_bytes(both.host) == 0) is (where == "around")
        run(both.there)
        assert both.gradients_differ() == []


@on_host
def test_host_memory_is_pinned_and_used_again(sim, halved):
    told = []
    for x in inputs(sim, 4):
        halved.host.zero_grad()
        halved.host(x).sum().backward()
        told.append(halved.handle.report())
        assert told[-1].pinned_bytes == told[-1].host_bytes
    assert told[0].host_bytes == told[-1].host_bytes
    assert told[0].host_bytes > 2 * halved.weight_bytes
    assert 0 < away_bytes(halved.host) < told[-1].host_bytes - halved.weight_bytes


@on_host
def test_batches_of_any_size_take_the_memory_of_the_largest(sim, halved):
    for n_samples in (200, 70, 120, 160, 90, 199):
        halved.host(inputs(sim, 1, n_samples)[0]).sum().backward()
        if n_samples == 200:
            most_bytes = away_bytes(halved.host)
    assert away_bytes(halved.host) == most_bytes


def test_the_host_waits_no_more_than_without(sim, pair):
    waits = {}
    for activations in (None, "host"):
        both = pair()
        x = inputs(sim)[0]
        with both.page(activations=activations):
            for _ in range(3):
                before = sim.host_waits
                both.host(x).sum().backward()
                waits[activations] = sim.host_waits - before
    assert waits["host"] == waits[None]


def test_memory_that_can_not_be_pinned_does_as_well(sim, pair):
    both = pair()
    with both.page(host="pageable", activations="host"):
        for x in inputs(sim):
            both.run(lambda model, x=x: model(x).sum().backward())
            assert both.gradients_differ() == []


def test_unpaging_between_forward_and_backward_refuses_it(sim, pair):
    both = pair()
    with both.page(activations="host"):
        loss = both.host(inputs(sim)[0]).sum()
    with pytest.raises(PagingError, match=r"^A backward pass needs weights of a model that was un"):
        loss.backward()
    del loss
    gc.collect()


def test_what_a_node_has_saved_can_be_looked_at(sim, pair):
    both = pair(Tanhs())
    with both.page(activations="host"):
        y = both.host(inputs(sim)[0])
        for _ in range(2):
            assert torch.equal(y.grad_fn._saved_result, y)
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        y.sum().backward()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"training": True, "activations": "disk"}, r"^activations='disk': write activations=\"ho"),
        ({"activations": "host"}, r"^activations='host' without training=True: only a backward"),
    ],
)
def test_what_makes_no_sense_is_refused(sim, options, text):
    with pytest.raises(PagingError, match=text):
        page(nn.Linear(2, 2), sim.device, **options)


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
