"""A training step in micro-batches over a paged model: exact where neither of both fits."""

import copy
import re
from pathlib import Path

import pytest
import torch

from tenure.adaptive import AdaptiveUsageError, add_listener, lazy, remove_listener, reset, step
from tenure.paging import page
from tests.shrinking import ask_to_shrink

from ..support import weight_bytes
from .blocks import LARGE, WIDTH, inputs, mlp

_TUTORIAL = Path(__file__).parents[3] / "docs" / "tutorial.md"


@pytest.fixture
def told():
    reset()
    events = []
    add_listener(events.append)
    yield events
    remove_listener(events.append)


@pytest.mark.exhaustive
@pytest.mark.sim_allocator("exact")
@pytest.mark.parametrize("activations", [None, "host"])
def test_the_pager_gives_memory_back_then_the_same_size_runs_then_a_smaller_one(
    sim, pair, told, activations
):
    model = mlp(12).double().eval()
    plain, x = copy.deepcopy(model), torch.randn(64, 4, WIDTH, dtype=torch.float64)
    whole = plain(x).square().mean()
    whole.backward()
    both = pair(model)
    sim(budget=int(1.25 * both.weight_bytes))
    with both.page(0.9, activations=activations) as handle:
        resident_bytes = handle._engine.room.resident_bytes
        found = step(lambda part: model(part).square().mean(), x, model=model, verify=False)
        assert handle._engine.room.resident_bytes < resident_bytes
        kinds = [event.kind for event in told]
        assert kinds[0] == "retry"
        assert "shrink" in kinds
        assert (told[0].size, told[0].next_size) == (64, 64)
        assert told[0].freed_bytes >= told[0].info.requested_bytes
        assert [event.size for event in told] == sorted((e.size for e in told), reverse=True)
        # activations on the host leave room for several times the samples
        assert (found.micro_batch >= 8) is (activations == "host")
        assert abs(found.loss.item() - whole.item()) < 1e-12
        gradients = [[p.grad for p in each.parameters()] for each in (model, plain)]
        torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)


@pytest.mark.exhaustive
@pytest.mark.sim_allocator("exact")
def test_the_paged_loop_of_the_tutorial(sim, told):
    pattern = r"```python\n([^`]*activations=\"host\"[^`]*)```"
    program = re.search(pattern, _TUTORIAL.read_text("utf-8"))[1]
    program = program.replace('"cuda"', "device").replace('"6GiB"', "budget")
    assert "device" in program
    model = mlp(12).eval()
    whole, n_bytes = copy.deepcopy(model), weight_bytes(model)
    batches = [torch.randn(32, 5, WIDTH) for _ in range(2)]
    names = {"page": page, "step": step, "model": model, "batches": batches, "device": sim.device}
    names["budget"] = int(0.6 * n_bytes)
    names["optimizer"] = torch.optim.SGD(model.parameters(), 0.01)
    names["loss_of"] = lambda batch: model(batch).square().mean()
    sim(budget=int(1.25 * n_bytes))
    exec(program, names)
    assert any(event.kind == "shrink" for event in told)
    there = torch.optim.SGD(whole.parameters(), 0.01)
    for batch in batches:
        there.zero_grad()
        whole(batch).square().mean().backward()
        there.step()
    torch.testing.assert_close(list(model.parameters()), list(whole.parameters()))


def test_a_lazy_batch_is_refused_by_name(sim):
    model, x = mlp(4), torch.randn(4, WIDTH, device=sim.device)
    for training, budget in ((True, "9KiB"), (False, "1MiB")):
        model.requires_grad_(training)
        with page(model, sim.device, budget=budget, training=training):
            with pytest.raises(AdaptiveUsageError, match=r"^A tensor of lazy\(\) was given to a"):
                model(lazy(x))
            model(x)


@pytest.mark.sim_allocator("exact")
def test_memory_is_given_back_between_forward_and_backward(sim, pair):
    both, freed_bytes = pair(), []

    def run(model):
        loss = model(inputs(sim)[0]).sum()
        freed_bytes.append(ask_to_shrink("sim", 1))
        loss.backward()

    with both.page(0.8):
        both.agree(run)
    assert freed_bytes[0] > 0


@pytest.mark.sim_allocator("exact")
@pytest.mark.parametrize("activations", [None, "host"])
def test_a_step_whose_memory_runs_out_anywhere_can_be_tried_again(sim, pair, activations):
    both, number = pair(), 1
    x = inputs(sim, 1, LARGE)[0]
    both.there(x).sum().backward()
    with both.page(0.6, activations=activations):
        while True:
            both.host.zero_grad()
            sim.fail_at(number)
            try:
                both.host(x).sum().backward()
            except torch.OutOfMemoryError:
                both.host.zero_grad()
                both.host(x).sum().backward()
            assert both.gradients_differ() == []
            if sim.failure_is_planted:
                break
            number += 4
    sim.fail_at(None)
    assert number > 20
