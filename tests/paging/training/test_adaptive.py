"""A training step in micro-batches over a paged model: exact where neither of both fits."""

import copy

import pytest
import torch

from tenure._registries import ask_to_shrink
from tenure.adaptive import step

from .blocks import WIDTH, inputs, transformer


@pytest.mark.sim_allocator("exact")
def test_a_step_that_fits_neither_whole_nor_unpaged_has_the_gradients_of_the_whole(sim, pair):
    torch.manual_seed(0)
    model = transformer().double().eval()
    plain, x = copy.deepcopy(model), torch.randn(64, 5, WIDTH, dtype=torch.float64)
    whole = plain(x).square().mean()
    whole.backward()
    both = pair(model)
    sim(budget=int(1.5 * both.weight_bytes))
    x = x.to(sim.device)
    with both.page(0.6):
        with pytest.raises(torch.OutOfMemoryError):
            model(x).square().mean().backward()
        for _ in range(2):
            model.zero_grad()
            found = step(lambda part: model(part).square().mean(), x, model=model)
            assert 1 <= found.micro_batch < 64
            assert abs(found.loss.item() - whole.item()) < 1e-12
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.sim_allocator("exact")
def test_memory_is_given_back_between_forward_and_backward(sim, pair):
    both = pair()
    x = inputs(sim)[0]
    with both.page(0.8):
        both.run(lambda model: model(x).sum().backward())
        freed_bytes = []

        def run(model):
            loss = model(x).sum()
            freed_bytes.append(ask_to_shrink("sim", 1))
            loss.backward()

        both.run(run)
        assert freed_bytes[0] > 0
        assert both.gradients_differ() == []


@pytest.mark.sim_allocator("exact")
@pytest.mark.parametrize("number", range(1, 60, 7))
def test_a_step_whose_memory_runs_out_anywhere_can_be_tried_again(sim, pair, number):
    both = pair()
    x = inputs(sim)[0]
    with both.page(0.6):
        for n_tries in range(2):
            both.host.zero_grad()
            sim.fail_at(number if n_tries == 0 else None)
            try:
                torch.manual_seed(3)
                sim.module.manual_seed_all(3)
                both.host(x).sum().backward()
            except torch.OutOfMemoryError:
                assert n_tries == 0
        torch.manual_seed(3)
        sim.module.manual_seed_all(3)
        both.there(x).sum().backward()
        assert both.gradients_differ() == []
