"""Optimizers that step while the backward pass runs, or by a scaler, do what they do after it."""

import copy
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import _MultiDeviceReplicator
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.optim.optimizer import _global_optimizer_pre_hooks

from tenure.paging import PagingError, page

from ..models import TiedLanguageModel
from ..support import about_values, weight_bytes
from .blocks import inputs, mlp

pytestmark = about_values


@pytest.fixture(autouse=True)
def _without_hooks_of_other_tests():
    """One step() of tenure.adaptive leaves a hook before steps, with which the whole step waits."""
    with patch.dict(_global_optimizer_pre_hooks, clear=True):
        yield


@pytest.fixture
def model():
    return mlp()


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "AdamW": torch.optim.AdamW,
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


def run(sim, model, optimizer, *, meanwhile, xs=None, schedule=None, **options):
    """Some steps; the values, the states and the settings after them."""
    scheduler = schedule and schedule(optimizer)
    budget = int(weight_bytes(model) * 0.7)
    with page(model, sim.device, 1, budget=budget, training=True) as handle:
        for x in inputs(sim, 3) if xs is None else xs:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            if meanwhile:
                with handle.optimizer_step(optimizer, **options):
                    loss.backward()
            else:
                loss.backward()
                if options:
                    nn.utils.clip_grad_norm_(model.parameters(), **options)
                optimizer.step()
            if scheduler:
                scheduler.step()
    settings = [value for g in optimizer.param_groups for k, value in g.items() if k != "params"]
    of_each = sorted(optimizer.state_dict()["state"].items())
    states = [value for _, state in of_each for value in state.values()]
    return [*model.state_dict().values(), *states, *settings]


def equal(one, other):
    return all(map(torch.equal, one, other))


def assert_same(sim, model, make, **options):
    """That steps while the backward pass runs give what those after it do."""
    found = [
        run(sim, each, make(each.parameters()), meanwhile=meanwhile, **options)
        for each, meanwhile in ((copy.deepcopy(model), False), (model, True))
    ]
    for ours, plain in zip(*found, strict=True):
        assert torch.equal(ours, plain) if isinstance(ours, torch.Tensor) else ours == plain


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_gives_the_same_bit_for_bit(sim, model, name):
    assert_same(sim, model, OPTIMIZERS[name])


@pytest.mark.parametrize(
    ("name", "optimizer"), [("LambdaLR", "AdamW"), ("OneCycleLR", "SGD"), ("OneCycleLR", "AdamW")]
)
def test_a_schedule_of_rates_and_momenta(sim, model, name, optimizer):
    plain, make = copy.deepcopy(model), OPTIMIZERS[optimizer]
    assert_same(sim, model, make, schedule=SCHEDULES[name])
    run(sim, plain, make(plain.parameters()), meanwhile=True)
    assert not any(map(torch.equal, model.parameters(), plain.parameters()))


def test_groups_frozen_weights_and_gradients_that_are_clipped_before(sim, model):
    model[2].weight.requires_grad_(False)

    def make(parameters):
        one, *rest = parameters
        return torch.optim.AdamW([{"params": [one], "lr": 0.1}, {"params": rest}], lr=0.01)

    assert_same(sim, model, make, max_norm=0.01)


def test_tied_weights_are_stepped_once_when_all_uses_are_over(sim):
    model, xs = TiedLanguageModel(), [torch.randint(50, (2, 9)).to(sim.device)] * 3
    assert_same(sim, model, OPTIMIZERS["SGD"], xs=xs)


def test_a_unit_is_stepped_while_others_still_compute(sim, model):
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    first, *_, last = model.parameters()
    before, seen = last.detach().clone(), []
    first.register_post_accumulate_grad_hook(lambda _: seen.append(torch.equal(last, before)))
    run(sim, model, optimizer, meanwhile=True, xs=inputs(sim, 1))
    assert seen == [False]


def test_a_hook_before_the_step_may_change_gradients_or_refuse_the_step(sim, model):
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = OPTIMIZERS["SGD"](model.parameters())

    def refuse(*_):
        raise ZeroDivisionError

    def clear(given, *_):
        for group in given.param_groups:
            for p in group["params"]:
                p.grad.zero_()

    with optimizer.register_step_pre_hook(clear):
        run(sim, model, optimizer, meanwhile=True)
    assert equal(before, model.parameters())
    optimizer.register_step_pre_hook(refuse)
    with pytest.raises(ZeroDivisionError):
        run(sim, model, optimizer, meanwhile=True)
    assert equal(before, model.parameters())


def test_what_looks_at_several_parameters_and_a_second_pass_are_refused(sim, model):
    class Own(torch.optim.SGD):
        pass

    x, sgd = inputs(sim)[0], torch.optim.SGD(model.parameters(), 0.1)
    with page(model, sim.device, training=True) as handle:
        for optimizer in (torch.optim.LBFGS(model.parameters()), Own(model.parameters(), 0.1)):
            with pytest.raises(PagingError, match=f"given {type(optimizer).__name__}, which may"):
                handle.optimizer_step(optimizer)
        step = handle.optimizer_step(sgd)
        step.__enter__()
        model(x).sum().backward()
        with pytest.raises(PagingError, match=r"^A second backward pass has added") as caught:
            model(x).sum().backward()
        assert not step.__exit__(PagingError, caught.value, None)
    with pytest.raises(PagingError, match="not paged for training"):
        handle.optimizer_step(sgd)


def test_a_backward_pass_that_fails_leaves_the_rest_unstepped(sim, model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = model[0].weight.clone()
    with page(model, sim.device, 1, budget="16KiB", training=True) as handle:
        loss = model(inputs(sim)[0]).sum()
        hook = model[0].weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError), handle.optimizer_step(optimizer):
            loss.backward()
        hook.remove()
        assert torch.equal(model[0].weight, before)
        optimizer.zero_grad()
        model(inputs(sim)[0]).sum().backward()
    assert [len(g["params"]) for g in optimizer.param_groups] == [len(list(model.parameters()))]


def scaled(model, make, sim, *, clip):
    """Some steps, in one of which a gradient is infinite; the scales and values after each."""
    optimizer = make(list(model.parameters()))
    scaler = torch.amp.GradScaler(sim.device.type, init_scale=1024.0, growth_interval=2)
    found = []
    for n, x in enumerate(inputs(sim, 5)):
        optimizer.zero_grad()
        loss = model(x.double()).square().mean() * (torch.inf if n == 1 else 1)
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        values = [p.detach().cpu().clone() for p in model.parameters()]
        found.append((scaler.get_scale(), values))
    return found


def fused_at_home(p):
    return torch.optim.AdamW(p, 1e-3, eps=1e-4, fused=p[0].device.type == "cpu")


@pytest.mark.parametrize(
    ("make", "clip"),
    [
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=False), True),
        (fused_at_home, False),
        (fused_at_home, True),
    ],
)
def test_a_scale_on_the_device_scales_as_that_of_a_whole_model(sim, pair, model, make, clip):
    both = pair(model.double())
    before = vars(_MultiDeviceReplicator)["get"]
    with both.page():
        with pair().page():
            pass  # the end of another model changes nothing
        assert vars(_MultiDeviceReplicator)["get"] is not before
        ours, theirs = both.run(lambda m: scaled(m, make, sim, clip=clip))
    assert vars(_MultiDeviceReplicator)["get"] is before
    assert [scale for scale, _ in ours] == [1024.0, 512.0, 512.0, 1024.0, 1024.0]
    assert [scale for scale, _ in theirs] == [scale for scale, _ in ours]
    values = [values for _, values in ours]
    assert equal(values[0], values[1])
    assert not any(map(torch.equal, values[1], values[2]))
    for mine, (_, other) in zip(values, theirs, strict=True):
        assert all(map(torch.allclose, mine, other))
