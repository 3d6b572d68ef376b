"""Weights whose data is exchanged between calls, as averages of weights and swaps do."""

import copy

import pytest
import torch
from torch import nn

from tenure.paging import PagingError, page

# about values, which no allocator changes: once, with the one that has more rules
pytestmark = pytest.mark.sim_allocator("cuda")

WIDTH = 16
UNIT_BYTES = 2048
LEAST = 2 * UNIT_BYTES


def rotate(a, b, c):
    a.data, b.data, c.data = b.data, c.data, a.data


def swap_handles(a, b, _):
    torch.utils.swap_tensors(a, b)


def transpose(a, b, _):
    a.data = a.data.t()


def take_the_transposed(a, b, _):
    b.data = a.data.t()
    a.data = torch.zeros_like(a.data)


def layers():
    torch.manual_seed(0)
    made = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    # whole numbers, whose sums are the same in any order: a transposed weight has another one
    for each in made.parameters():
        each.data = torch.randint(-2, 3, each.shape).float()
    return made


def run(model, sim):
    with torch.no_grad():
        return model(torch.ones(2, WIDTH, device=sim.device)).cpu()


def assert_same(ours, theirs, sim):
    assert run(ours, sim).equal(run(copy.deepcopy(theirs).to(sim.device), sim))
    for mine, others in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert mine.equal(others)


EXCHANGES = [rotate, swap_handles, transpose, take_the_transposed]


@pytest.mark.parametrize(
    ("where", "exchange"),
    [
        *(("one unit", exchange) for exchange in EXCHANGES),
        *(("trained, a unit each", exchange) for exchange in EXCHANGES),
        *(("on a disk", exchange) for exchange in (rotate, swap_handles)),
    ],
)
def test_exchanged_values_are_those_of_the_plain_model(sim, where, exchange, tmp_path):
    model = layers()
    plain = copy.deepcopy(model)
    size = 4 * (WIDTH + 1) * WIDTH if where == "one unit" else 1
    budget = None if where == "one unit" else LEAST
    host = tmp_path if where == "on a disk" else "pinned"
    training = where == "trained, a unit each"
    with page(model, sim.device, size, budget=budget, training=training, host=host):
        for _ in range(2):
            assert_same(model, plain, sim)
            for each in (model, plain):
                exchange(*[layer.weight for layer in each[:3]])
            assert_same(model, plain, sim)
    for mine, others in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.equal(others)


@pytest.mark.parametrize("budget", [None, LEAST])
@pytest.mark.parametrize("where", ["on the host", "on a disk", "trained"])
def test_an_average_of_weights_is_applied_and_taken_back(sim, budget, where, tmp_path):
    model = layers()
    plain, pinned = copy.deepcopy(model), []
    options = {"training": where == "trained", "host": tmp_path if "disk" in where else "pinned"}
    with page(model, sim.device, 1, budget=budget, **options) as handle:
        for _ in range(3):
            kept = {each: each.data for each in model.parameters()}
            for each in model.parameters():
                each.data = each.data * 0.5
            run(model, sim)
            for each, value in kept.items():
                each.data = value
            del kept
            assert_same(model, plain, sim)
            pinned.append(handle._engine.pinned_bytes)
        assert len(set(pinned)) == 1


def to_each_other(a, b):
    a.data = b.data


def to_a_part(a, b):
    b.data = torch.zeros(WIDTH + 1, WIDTH)[1:]
    a.data = torch.as_strided(b.data, (WIDTH, WIDTH), (WIDTH, 1), 0)


@pytest.mark.parametrize("tie", [to_each_other, to_a_part])
def test_a_tie_that_comes_while_it_is_paged_is_refused(sim, tie):
    model = layers()
    a, b = (model[i].weight for i in (1, 0))
    with page(model, sim.device, 1):
        tie(a, b)
        with pytest.raises(PagingError, match=r"^'[01]\.weight' was given the memory of '[01]\."):
            run(model, sim)
        a.data = torch.zeros(WIDTH, WIDTH)
        run(model, sim)


@pytest.mark.parametrize("budget", [None, LEAST])
def test_data_set_between_a_forward_and_its_backward_pass_raises_if_not_given_back(sim, budget):
    model, x = layers(), torch.ones(2, WIDTH, device=sim.device)
    plain = copy.deepcopy(model).to(sim.device)
    with page(model, sim.device, 1, budget=budget, training=True):
        loss = model(x).sum()
        model[1].weight.data = model[1].weight.data * 2
        with pytest.raises(RuntimeError, match=r"^one of the variables .* '1\.weight' is at vers"):
            loss.backward()
        model.zero_grad()
        plain[1].weight.data *= 2
        for each in (model, plain):
            loss, kept = each(x).sum(), each[1].weight.data
            each[1].weight.data = kept * 2
            each[1].weight.data = kept
            loss.backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert mine.grad.equal(theirs.grad.cpu())
