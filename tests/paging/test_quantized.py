"""Weights that are made of other tensors, as quantized ones are, pass through as plain ones do."""

import copy
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from tenure import NewDisposeScope
from tenure.paging import PagingError, page, plan_paging

from .models import WIDTH, mlp
from .quantized import Quantized, quantized


def without_meaning(output):
    """Both halves of a result, or the result."""
    return torch.cat([output.a, output.b]) if isinstance(output, TwoTensor) else output


class Sides(NamedTuple):
    host: nn.Module
    there: nn.Module


def sides(sim):
    torch.manual_seed(0)
    host = quantized(mlp().eval())
    return Sides(host, copy.deepcopy(host).to(sim.device))


def x_of(sim):
    torch.manual_seed(1)
    return torch.randn(4, WIDTH).to(sim.device)


@torch.no_grad()
def result(model, x):
    return without_meaning(model(x)).cpu()


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_weights_pass_and_give_the_results_of_the_model_on_the_device(sim, is_on_disk, tmp_path):
    host, there = sides(sim)
    x, before = x_of(sim), copy.deepcopy(host).state_dict()
    budget = plan_paging(host, sim.device).weight_bytes * 6 // 10
    host_place = tmp_path if is_on_disk else "pinned"
    objects = list(host.parameters())
    with page(host, sim.device, budget=budget, host=host_place) as handle:
        assert handle.plan.ring_bytes
        weights = sum(p.numbers.nbytes + p.scale.nbytes for p in host.parameters() if p.dim() == 2)
        biases = sum(p.nbytes for p in host.parameters() if p.dim() == 1)
        # and what is lost where each begins at a whole place
        assert weights + biases <= handle.plan.weight_bytes < 1.3 * (weights + biases)
        for _ in range(3):
            with NewDisposeScope():
                assert torch.equal(result(host, x), result(there, x))
        report = handle.report()
        assert report.bytes_per_pass == sum(u.n_bytes for u in handle.plan.units if not u.resident)
        assert report.faults == 0
        assert all(a is b for a, b in zip(host.parameters(), objects, strict=True))
    assert torch.equal(result(host, x.cpu()), result(there, x))
    for name, value in host.state_dict().items():
        assert torch.equal(as_plain(value), as_plain(before[name])), name


def as_plain(value):
    return value.plain() if isinstance(value, Quantized) else value


def test_writes_on_either_side_arrive(sim):
    host, there = sides(sim)
    x = x_of(sim)
    other = Quantized.of(torch.randn(WIDTH, WIDTH))

    def write(module, args):
        module.weight.copy_(other.to(module.weight.device))

    with page(host, sim.device, budget=5 * 1024):
        result(host, x)
        for model in (host, there):
            with torch.no_grad():
                model[0].weight.copy_(other.to(model[0].weight.device))
                # past all versions
                model[2].weight.scale.data.mul_(2)
        assert torch.equal(result(host, x), result(there, x))
        hooks = [model[6].register_forward_pre_hook(write) for model in (host, there)]
        assert torch.equal(result(host, x), result(there, x))
        for hook in hooks:
            hook.remove()
        assert torch.equal(host[6].weight.numbers, other.numbers)
        state = {name: as_plain(value) + 1 for name, value in host.state_dict().items()}
        for model in (host, there):
            values = {
                name: Quantized.of(value) if "weight" in name else value
                for name, value in state.items()
            }
            model.load_state_dict(values)
        assert torch.equal(result(host, x), result(there, x))


# --- over such a base


class Adapted(nn.Module):
    """A linear layer that is frozen, and a small one beside it."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def test_adapters_train_over_it_and_graphs_keep_no_weights(sim):
    torch.manual_seed(0)
    layers = [Adapted(layer) for layer in quantized(mlp().requires_grad_(False))[::2]]
    host = nn.Sequential(*layers)
    there, x = copy.deepcopy(host).to(sim.device), x_of(sim)
    optimizers = [
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        for model in (host, there)
    ]
    with page(host, sim.device, budget=6 * 1024, training=True) as handle:
        assert handle.plan.ring_bytes < sum(u.n_bytes for u in handle.plan.units if not u.resident)
        for _ in range(3):
            losses = []
            for model, optimizer in zip((host, there), optimizers, strict=True):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                losses.append(loss.detach().cpu())
            assert torch.equal(*losses)
            for p, q in zip(host.parameters(), there.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None)
                assert p.grad is None or torch.equal(p.grad, q.grad.cpu())
            for optimizer in optimizers:
                optimizer.step()


# --- what can't


class Params4bit(nn.Parameter):
    """As of bitsandbytes: bytes, and a state beside them that moves with its own `to()`."""

    def __new__(cls, data):
        made = torch.Tensor._make_subclass(cls, data, False)
        made.quant_state = None
        return made

    def to(self, *args, **kwargs):
        return super().to(*args, **kwargs)


def test_a_parameter_with_a_state_beside_its_bytes_is_refused(sim):
    host = mlp()
    host[2].weight = Params4bit(torch.ones(WIDTH, WIDTH, dtype=torch.uint8))
    told = r"^'2\.weight' is a Params4bit, which moves itself: .* Page the model before it is quant"
    with pytest.raises(PagingError, match=told):
        page(host, sim.device)


class Property(Quantized):
    """Makes a part each time that it is asked for it."""

    @property
    def zero(self):
        return torch.empty(0)

    @zero.setter
    def zero(self, value):
        pass


def two(weight):
    # refuses parts that do not begin at the same place of their storages, as in a page
    return nn.Parameter(TwoTensor(weight.detach(), weight.detach() * 2), requires_grad=False)


@pytest.mark.parametrize("make", [Property.of, two, torch.Tensor.to_sparse])
def test_one_that_can_not_be_made_anew_is_refused_and_the_model_is_as_before(sim, make):
    torch.manual_seed(0)
    host = mlp().eval()
    weight = make(host[10].weight.detach())
    host[10].weight = nn.Parameter(weight, requires_grad=False)
    with pytest.raises(PagingError, match=r"^'10\.weight' \(.*\) can't be paged: it is sparse, or"):
        page(host, sim.device)
    assert host[10].weight.device.type == "cpu"
    assert sim.allocated_bytes == 0
