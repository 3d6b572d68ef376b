"""An optimizer that steps while the backward pass runs does what it does after it."""

import copy
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.optim.optimizer import (
    _global_optimizer_pre_hooks,
)

from tenure.paging import PagingError, page

from ..models import TiedLanguageModel
from .blocks import inputs, transformer

# about values, which no allocator changes: once, with the one that has more rules
pytestmark = pytest.mark.sim_allocator("cuda")


@pytest.fixture(autouse=True)
def _without_hooks_of_other_tests():
    """One step() of tenure.adaptive leaves a hook before steps, with which the whole step waits."""
    with patch.dict(_global_optimizer_pre_hooks, clear=True):
        yield


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, fused=True),
    "AdamW, amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True, foreach=True),
    **{
        name: lambda p, name=name: getattr(torch.optim, name)(p, lr=0.01)
        for name in ("Adafactor", "ASGD", "NAdam", "RMSprop", "Rprop")
    },
}

SCHEDULES = {
    "LambdaLR": lambda optimizer: LambdaLR(optimizer, lambda n: 0.5**n),
    # betas of Adam, momentum of others
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, 0.2, total_steps=5, cycle_momentum=True),
}


def run(sim, model, optimizer, *, meanwhile, steps=3, schedule=None, **options):
    """The values after some steps, and the groups' settings at last."""
    scheduler = schedule and schedule(optimizer)
    weight_bytes = sum(p.nbytes for p in model.parameters())
    with page(model, sim.device, budget=int(weight_bytes * 0.7), training=True) as handle:
        for x in inputs(sim, steps):
            sim.module.manual_seed_all(3)
            optimizer.zero_grad()
            if meanwhile:
                loss = model(x).square().mean()
                with handle.optimizer_step(optimizer, **options):
                    loss.backward()
            else:
                model(x).square().mean().backward()
                if options:
                    nn.utils.clip_grad_norm_(model.parameters(), **options)
                optimizer.step()
            if scheduler:
                scheduler.step()
    settings = [value for g in optimizer.param_groups for k, value in g.items() if k != "params"]
    return [*model.state_dict().values(), *state_of(optimizer), *settings]


def state_of(optimizer):
    of_each = sorted(optimizer.state_dict()["state"].items())
    return [value for _, state in of_each for value in state.values()]


def equal(one, other):
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(one, other, strict=True)
    )


def both(sim, model, make, **options):
    other = copy.deepcopy(model)
    return [
        run(sim, each, make(each.parameters()), meanwhile=meanwhile, **options)
        for each, meanwhile in ((model, True), (other, False))
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_gives_the_same_bit_for_bit(sim, name):
    torch.manual_seed(0)
    assert equal(*both(sim, transformer()[:3], OPTIMIZERS[name]))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "optimizer"), [("LambdaLR", "AdamW"), ("OneCycleLR", "SGD"), ("OneCycleLR", "AdamW")]
)
def test_a_schedule_of_rates_and_momenta(sim, name, optimizer):
    torch.manual_seed(0)
    model = transformer()[:3]
    plain = copy.deepcopy(model)
    make = OPTIMIZERS[optimizer]
    assert equal(*both(sim, model, make, steps=4, schedule=SCHEDULES[name]))
    run(sim, plain, make(plain.parameters()), meanwhile=True, steps=4)
    assert not any(map(torch.equal, model.parameters(), plain.parameters()))


def test_groups_frozen_weights_and_gradients_that_are_clipped_before(sim):
    torch.manual_seed(0)
    model = transformer()[:3]
    model[1].up.requires_grad_(False)

    def make(parameters):
        one, *rest = parameters
        return torch.optim.AdamW([{"params": [one], "lr": 0.1}, {"params": rest}], lr=0.01)

    assert equal(*both(sim, model, make, max_norm=0.01))


def test_a_unit_is_stepped_while_others_still_compute(sim):
    torch.manual_seed(0)
    model = transformer()
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    first, *_, last = model.parameters()
    before, seen = last.detach().clone(), []
    first.register_post_accumulate_grad_hook(lambda _: seen.append(torch.equal(last, before)))
    run(sim, model, optimizer, meanwhile=True, steps=1)
    assert seen == [False]


def test_a_hook_before_the_step_may_change_gradients_or_refuse_the_step(sim):
    torch.manual_seed(0)
    model = transformer()[:3]
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = OPTIMIZERS["SGD"](model.parameters())

    def refuse(*_):
        raise ZeroDivisionError

    def clear(given, *_):
        for group in given.param_groups:
            for p in group["params"]:
                p.grad.zero_()

    with optimizer.register_step_pre_hook(clear):
        run(sim, model, optimizer, meanwhile=True, steps=1)
    assert equal(before, model.parameters())
    optimizer.register_step_pre_hook(refuse)
    with pytest.raises(ZeroDivisionError):
        run(sim, model, optimizer, meanwhile=True, steps=1)
    assert equal(before, model.parameters())


def test_tied_weights_are_stepped_once_when_all_uses_are_over(sim):
    found = []
    for meanwhile in (True, False):
        torch.manual_seed(0)
        model = TiedLanguageModel()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        tokens = torch.randint(50, (2, 9)).to(sim.device)
        with page(model, sim.device, budget="30KiB", training=True) as handle:
            for _ in range(3):
                optimizer.zero_grad()
                loss = model(tokens).square().mean()
                if meanwhile:
                    with handle.optimizer_step(optimizer):
                        loss.backward()
                else:
                    loss.backward()
                    optimizer.step()
        found.append(list(model.state_dict().values()))
    assert equal(*found)


def test_who_looks_at_several_parameters_is_refused(sim):
    model = transformer()[:2]

    class Own(torch.optim.SGD):
        pass

    with page(model, sim.device, training=True) as handle:
        for optimizer in (torch.optim.LBFGS(model.parameters()), Own(model.parameters(), 0.1)):
            with pytest.raises(PagingError, match=f"given {type(optimizer).__name__}, which may"):
                handle.optimizer_step(optimizer)
    with pytest.raises(PagingError, match="not paged for training"):
        handle.optimizer_step(torch.optim.SGD(model.parameters(), 0.1))


def test_a_second_backward_pass_in_the_block_is_refused(sim):
    model = transformer()[:2]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = inputs(sim)[0]
    with page(model, sim.device, training=True) as handle:
        step = handle.optimizer_step(optimizer)
        step.__enter__()
        model(x).sum().backward()
        with pytest.raises(PagingError, match=r"^A second backward pass has added") as caught:
            model(x).sum().backward()
        assert not step.__exit__(PagingError, caught.value, None)


def test_a_backward_pass_that_fails_leaves_the_rest_unstepped(sim):
    model = transformer()[:3]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = model[0].up.weight.clone()
    with page(model, sim.device, budget="60KiB", training=True) as handle:
        loss = model(inputs(sim)[0]).sum()
        hook = model[0].up.weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError), handle.optimizer_step(optimizer):
            loss.backward()
        hook.remove()
        assert torch.equal(model[0].up.weight, before)
        optimizer.zero_grad()
        model(inputs(sim)[0]).sum().backward()
    assert [len(g["params"]) for g in optimizer.param_groups] == [len(list(model.parameters()))]
