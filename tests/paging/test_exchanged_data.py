"""Weights whose data is exchanged between calls, as averages of weights and swaps do."""

import copy

import pytest
import torch

from tenure.paging import PagingError, page

from .models import linears
from .support import about_values, assert_equal

pytestmark = about_values

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
    made = linears(4, WIDTH).train()
    # whole numbers, whose sums are the same in any order: a transposed weight has another one
    for each in made.parameters():
        each.data = torch.randint(-2, 3, each.shape).float()
    return made


def run(model, sim):
    with torch.no_grad():
        return model(torch.ones(2, WIDTH, device=sim.device)).cpu()


def assert_same(ours, theirs, sim):
    assert run(ours, sim).equal(run(copy.deepcopy(theirs).to(sim.device), sim))
    assert_equal(list(ours.parameters()), list(theirs.parameters()))


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
    assert_equal(list(model.parameters()), list(plain.parameters()))


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


def doubled(optimizer, weight):
    weight.data = weight.data * 2


def stepped(optimizer, weight):
    optimizer.step()


@pytest.mark.parametrize(("change", "name"), [(doubled, "1.weight"), (stepped, "3.weight")])
@pytest.mark.parametrize("budget", [None, LEAST])
def test_a_change_between_a_forward_and_its_backward_pass_raises_if_not_given_back(
    sim, budget, change, name
):
    model, x = layers(), torch.ones(2, WIDTH, device=sim.device)
    optimizer, weight = torch.optim.SGD(model.parameters(), 0.1), model[1].weight
    with page(model, sim.device, 1, budget=budget, training=True):
        model(x).sum().backward()
        loss = model(x).sum()
        change(optimizer, weight)
        with pytest.raises(RuntimeError, match=rf"^one of the variables .* '{name}' is at vers"):
            loss.backward()
        model.zero_grad()
        plain = copy.deepcopy(model).to(sim.device)
        for each in (model, plain):
            loss, kept = each(x).sum(), each[1].weight.data
            each[1].weight.data = kept * 2
            each[1].weight.data = kept
            loss.backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert mine.grad.equal(theirs.grad.cpu())
