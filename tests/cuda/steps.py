"""`step` on a device that its batch does not fit: the gradients are those of the whole batch."""

import copy

import torch
from torch import nn

from tenure.adaptive import NoBatchsizeCache, step

from .rig import MIB, check, off_by


def _network():
    return nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 1))


def _gradients(model):
    return [parameter.grad.clone() for parameter in model.parameters()]


@check(sim={"allocator": "exact"})
def step_float64(rig):
    """In float64 what a split changes by rounding is nothing: gradients agree to 1e-10."""
    model = _network().double().to(rig.device)
    x = torch.randn(rig.pick(8192, 512), 256, dtype=torch.float64, device=rig.device)
    whole = copy.deepcopy(model)
    loss = whole(x).square().mean()
    loss.backward()
    loss = loss.item()
    with rig.limited(rig.pick(60, 5) * MIB):
        result = step(lambda x: model(x).square().mean(), x, cache_type=NoBatchsizeCache)
    difference = off_by(_gradients(model), _gradients(whole))
    assert result.attempts > 1
    assert abs(result.loss.item() / loss - 1) < 1e-10
    assert difference < 1e-10
    return {
        "attempts": result.attempts, "micro_batch": result.micro_batch, "off_by": difference,
    }  # fmt: skip


@check(sim={"allocator": "exact"})
def step_amp(rig):
    """With autocast and a scaler a split is no further from float64 than the plain step is."""
    start, kind = _network(), rig.device.type
    x = torch.randn(rig.pick(8192, 1024), 256)
    exact = copy.deepcopy(start).double()
    exact(x.double()).square().mean().backward()
    truth = _gradients(exact)

    def train(run):
        """How far the gradients of each step are from the truth, and what the steps leave."""
        model = copy.deepcopy(start).to(rig.device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler(kind, init_scale=1024.0, growth_interval=2)
        errors, outcomes = [], []

        def loss(x):
            with torch.autocast(kind, torch.float16):
                return model(x).float().square().mean()

        for _ in range(3):
            optimizer.zero_grad()
            outcomes.append(run(loss, scaler))
            scaler.unscale_(optimizer)
            errors.append(off_by(_gradients(model), truth))
            scaler.step(optimizer)
            scaler.update()
        values = [p.detach().clone() for p in model.parameters()]
        return errors[0], outcomes[0], scaler.get_scale(), values

    there = x.to(rig.device)

    def split(loss, scaler):
        with rig.limited(rig.pick(16, 3) * MIB):
            return step(loss, there, scaler=scaler, cache_type=NoBatchsizeCache)

    plain_error, _, plain_scale, plain_values = train(
        lambda loss, scaler: scaler.scale(loss(there)).backward()
    )
    split_error, result, split_scale, split_values = train(split)
    assert result.attempts > 1, result
    assert split_scale == plain_scale == 2048.0, (split_scale, plain_scale)
    assert split_error < 1.5 * plain_error + 1e-4, (split_error, plain_error)
    assert off_by(split_values, plain_values) < 1e-3
    return {
        "sizes": result.micro_batch,
        "attempts": result.attempts,
        "off_by": split_error,
        "plain_off_by": plain_error,
    }
