"""Programs in which each wait of the pager matters: their values are right, and no race is found.

Others computed some of them wrongly without a word, where a docstring says. `tests.planted_faults`
leaves the waits out one by one.
"""

import copy

import pytest
import torch
from torch import nn

from tenure.paging import PagingBudget, page
from tenure.testing import Rates

from .models import WIDTH, SumOnSideStream, by_the_weight, linears
from .support import Pair, about_values, weight_bytes
from .training.blocks import LARGE, inputs, transformer

pytestmark = about_values

UNIT_BYTES = 4 * WIDTH * (WIDTH + 1) + 128


def random(sim):
    torch.manual_seed(1)
    return torch.randn(4, WIDTH, device=sim.device)


def whole(sim, model):
    return copy.deepcopy(model).to(sim.device)


def small(n_layers):
    """Room for so many of the layers, and for none to stay."""
    return n_layers * (UNIT_BYTES + 256)


def count_call(module, args, output):
    module.seen.add_(1)


class Written(nn.Module):
    """Writes a buffer and comes back to it, after others took its place."""

    def __init__(self, widths, used):
        super().__init__()
        self.count = nn.Linear(WIDTH, WIDTH)
        self.count.register_buffer("seen", torch.zeros(WIDTH, WIDTH))
        self.count.register_forward_hook(count_call)
        self.others = nn.ModuleList([nn.Linear(WIDTH, width * WIDTH) for width in widths])
        self.used = used

    def forward(self, x):
        for which in self.used:
            x = self.count(self.others[which](self.count(x))[:, :WIDTH])
        return x


def writes_buffers_and_reads_them_again(sim):
    x = random(sim)
    for widths, used, kib, prefetch in (
        *[((2, 2, 2), (0, 1, 2), *each) for each in ((18, 0), (27, 0), (27, 1), (100, 0))],
        # it comes back to another place, while its own is free
        ((2, 3, 3), (0, 0, 0), 27, 1),
    ):
        torch.manual_seed(0)
        model = Written(widths, used).eval()
        sim(rates=Rates(d2h_bytes_per_s=1e7))
        with page(model, sim.device, budget=kib << 10, prefetch=prefetch):
            for n_passes in (1, 2):
                model(x)
                assert model.count.seen.eq(6 * n_passes).all()


def reads_values_as_soon_as_they_are_home(sim):
    """verl#6447: the host reads, or frees, what a copy has yet to write, or to read."""
    sim(rates=Rates(d2h_bytes_per_s=1e6))
    model, seen = linears(6), torch.zeros(64)
    model[1].register_buffer("seen", seen)
    model[1].register_forward_hook(count_call)
    with page(model, sim.device, budget=small(2)):
        for n in (1, 2, 3):
            model(random(sim))
            assert seen.eq(n).all()
    assert model[1].seen.eq(3).all()


def is_unpaged_while_it_computes(sim):
    model, x = linears(6), random(sim)
    with page(model, sim.device, budget="15KiB"):
        model(x)


def takes_memory_after_what_used_it(sim):
    sim(rates=Rates(memory_bytes_per_s=1e8))
    model, x = linears(6), random(sim)
    for budget in ("9KiB", "100KiB"):
        sim.module.synchronize()
        torch.zeros(1 << 16, device=sim.device).add_(1)  # its memory may be what the pager gets
        busy_until_s = sim.module.current_stream().ready_s
        with page(model, sim.device, budget=budget) as handle:
            model[5](x)
            # nothing else tells when a copy ran: the device runs one kernel after the other
            pages = handle._pager.engine.room.pages.values()
            assert all(each.ready.at_s > busy_until_s for each in pages)


def has_layers_that_its_ring_does_not_divide_behind_a_slow_link(sim):
    """vllm#54975, fairscale OffloadModel: a slot is overwritten, or read before its copy."""
    sim(rates=Rates(h2d_bytes_per_s=1e6))
    x = random(sim)
    for n, n_slots in ((6, 2), (4, 3), (5, 3), (7, 3)):
        model = linears(n)
        expected = whole(sim, model)(x)
        with page(model, sim.device, budget=small(n_slots)):
            for _ in range(3):
                assert torch.equal(model(x), expected)


def changes_weights_between_passes(sim):
    """diffusers#11791, ComfyUI#13989: copies on the device are from before, or get it twice."""
    model, x = linears(6), random(sim)
    for budget in ("15KiB", "1MiB"):
        plain, outputs = whole(sim, model), []
        with page(model, sim.device, budget=budget):
            for _ in range(3):
                # looked at when all is launched: that waits for the device
                outputs.append((model(x), plain(x)))
                for layer, twin in zip(model, plain, strict=True):
                    layer.weight.data += 0.1
                    twin.weight.data += 0.1
        assert all(torch.equal(*both) for both in outputs)


def changes_a_weight_that_is_still_there(sim):
    model, x = linears(6), random(sim)
    with page(model, sim.device, budget="15KiB"):
        model(x)
        model[5].weight.data += 0.1
        expected = whole(sim, model[5])(x)
        assert torch.equal(model[5](x), expected)


def loads_a_state_dict_while_weights_stay(sim):
    """accelerate: "<All keys matched successfully>", and the forward keeps the old weights."""
    x = random(sim)
    for budget in ("1MiB", small(2)):
        model = linears(6)
        new = {name: value * -0.5 + 0.1 for name, value in model.state_dict().items()}
        with page(model, sim.device, budget=budget):
            model(x)
            model.load_state_dict(new)
            expected = whole(sim, model)(x)
            assert all(torch.equal(model(x), expected) for _ in range(3))


def gives_memory_back(sim):
    """comfy-aimdo#65: what goes under pressure is unmapped before its last use is over."""
    x = random(sim)
    for n_passes in (0, 1):
        model, other, budget = linears(6), linears(8), PagingBudget("40KiB")
        twin, other_twin = whole(sim, model), whole(sim, other)
        with page(model, sim.device, budget=budget):
            for _ in range(n_passes):
                model(x)
            with page(other, sim.device, budget=budget):
                for _ in range(4):
                    assert torch.equal(other(x), other_twin(x))
                assert torch.equal(model(x), twin(x))


class Beside(nn.Module):
    """Reads its weight on a stream of its own, which nothing joins but who asks for it."""

    def __init__(self, sim):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.module, self.side, self.seen = [sim.module], [sim.module.Stream()], []

    def forward(self, x):
        with self.module[0].stream(self.side[0]):
            self.seen.append(self.weight * 2)
        return x + 1


def reads_weights_on_streams_of_their_own(sim):
    """diffusers#12673, #12721: the memory is kept for another stream than the one that reads it."""
    sim(rates=Rates(memory_bytes_per_s=1e8))
    model = nn.Sequential(*[Beside(sim) for _ in range(6)]).eval()
    with page(model, sim.device, budget="10KiB", prefetch=1):
        for _ in range(3):
            model(random(sim))


def trains_and_evaluates(sim, activations=None):
    """Steps, a gradient that is added to, and a forward that no backward pass follows."""
    sim(rates=Rates(d2h_bytes_per_s=1e8 if activations else 1e9, h2d_bytes_per_s=1e9))
    both = Pair(sim, transformer())

    def step(model, x):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            model(x).square().mean().backward()
        model(x)
        optimizer.step()
        optimizer.zero_grad()

    with torch.enable_grad(), both.page(activations=activations):
        for x in inputs(sim, 2, LARGE if activations else 2):
            both.run(lambda model, x=x: step(model, x))
            assert both.values_differ() == []


def trains_with_activations_on_the_host(sim):
    trains_and_evaluates(sim, "host")


def reads_gradients_as_soon_as_they_are_there(sim):
    """verl#6447, of gradients: the optimizer reads what a copy has yet to write."""
    sim(rates=Rates(d2h_bytes_per_s=1e6))
    both, x = Pair(sim, linears(6).train()), random(sim)
    with both.page(small(2) / both.weight_bytes), torch.enable_grad():
        for factor in (1, 2):
            both.run(lambda model, factor=factor: model(factor * x).square().sum().backward())
        assert both.gradients_differ() == []


PROGRAMS = (
    writes_buffers_and_reads_them_again,
    reads_values_as_soon_as_they_are_home,
    is_unpaged_while_it_computes,
    takes_memory_after_what_used_it,
    has_layers_that_its_ring_does_not_divide_behind_a_slow_link,
    changes_weights_between_passes,
    changes_a_weight_that_is_still_there,
    loads_a_state_dict_while_weights_stay,
    gives_memory_back,
    reads_weights_on_streams_of_their_own,
    trains_and_evaluates,
    trains_with_activations_on_the_host,
    reads_gradients_as_soon_as_they_are_there,
)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_it_has_the_values_of_the_plain_model_and_no_race(sim, program):
    with torch.no_grad():
        program(sim)


# --- record_stream() keeps the bytes of a paged weight as it keeps those of any other tensor


def reading_beside(sim, record):
    """A model that reads its weights on a side stream, its input, and a budget of half of them."""
    sim(rates=Rates(flops_per_s=1e6))
    model = SumOnSideStream(sim.module, sim.module.Stream(), record, width=64)
    return model, torch.randn(4, 64, device=sim.device), weight_bytes(model) // 2


def test_a_stream_that_was_not_recorded_is_found_to_race(sim):
    model, x, budget = reading_beside(sim, lambda weight, stream: None)
    race = pytest.raises(RuntimeError, match="no wait orders the two")
    with torch.no_grad(), page(model, sim.device, budget=budget), race:
        model(x)
    assert sim.take_faults()


@pytest.mark.parametrize(
    "record",
    [
        by_the_weight,
        lambda weight, stream: weight.t()[3:].record_stream(stream),
        # looked up there, where paging has put its own
        lambda weight, stream: torch.Tensor.record_stream(weight, stream),
    ],
    ids=["weight", "view", "class"],
)
def test_a_weight_stays_until_the_stream_that_was_recorded_has_read_it(sim, record):
    model, x, budget = reading_beside(sim, record)
    weights = [layer.weight.detach().clone().requires_grad_() for layer in model.layers]
    expected = sum(x @ weight.to(sim.device) for weight in weights)
    expected.square().sum().backward()
    with torch.no_grad(), page(model, sim.device, budget=budget):
        for _ in range(3):
            assert torch.equal(model(x), expected)
    with page(model, sim.device, budget=budget, training=True):
        for _ in range(2):
            model.zero_grad()
            model(x).square().sum().backward()
            for layer, weight in zip(model.layers, weights, strict=True):
                torch.testing.assert_close(layer.weight.grad, weight.grad)
