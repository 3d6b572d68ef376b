"""How the tests of paging compare trees of tensors, choose budgets, and save models."""

import copy
import os

import pytest
import torch
from hypothesis import HealthCheck, settings
from safetensors.torch import save_file
from torch.utils._pytree import tree_map_only

from tenure.paging import PagingError, page, plan_paging

about_values = pytest.mark.sim_allocator("cuda")
"""Of values and words, which no allocator changes: once, with the one that has more rules."""


FIXTURES_ONCE = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
"""Of examples that begin with what they take of a fixture."""


def on_device(tree, device):
    return tree_map_only(torch.Tensor, lambda x: x.to(device), tree)


def home(tree):
    return on_device(tree, "cpu")


def assert_equal(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def on_meta(make):
    with torch.device("meta"):
        return make()


def saved(model, path):
    """The file of a model or a state dict as its user may have saved it: each name for itself."""
    state = model.state_dict() if isinstance(model, torch.nn.Module) else model
    save_file({name: value.contiguous().clone() for name, value in state.items()}, path)
    return path


def open_files(folder=""):
    """How many files, in a folder if one is named, this process holds open."""
    links = [os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
    return sum(str(folder) in os.readlink(each) for each in links if os.path.islink(each))


def whole_output(device, model, *args, **kwargs):
    """What a copy gives that is on the device whole, on the host."""
    args, kwargs = on_device((args, kwargs), device)
    return home(copy.deepcopy(model).to(device)(*args, **kwargs))


def weight_bytes(model):
    return sum(each.nbytes for each in model.parameters())


def percent_of_weights(model, device, percent, host="pinned"):
    """That share of the weights, or the least that the model can be paged in."""
    wanted_bytes = plan_paging(model, device, host=host).weight_bytes * percent // 100
    try:
        plan_paging(model, device, budget=wanted_bytes, host=host)
    except PagingError as error:
        return error.minimum_bytes
    return wanted_bytes


def paged(sim, model, percent=40, **options):
    """A model that is paged to a share of its weights."""
    n_bytes = plan_paging(model, sim.device).weight_bytes * percent // 100
    return page(model, sim.device, budget=n_bytes, **options)


class Pair:
    """A model to page, and the same one on the device; `handle` is of the first, if it is paged."""

    def __init__(self, sim, model):
        self.sim, self.host = sim, model
        self.there = copy.deepcopy(model).to(sim.device)
        self.weight_bytes = weight_bytes(model)

    def page(self, share=0.5, **options):
        budget = int(self.weight_bytes * share)
        return page(self.host, self.sim.device, budget=budget, training=True, **options)

    def run(self, step):
        """Have both do the same, with the same random numbers; what each returns."""
        results = []
        for model in (self.host, self.there):
            torch.manual_seed(3)
            self.sim.module.manual_seed_all(3)
            results.append(step(model))
        return results

    def agree(self, step):
        """Have both do the same, and check that results and gradients are equal bit for bit."""
        paged, plain = self.run(step)
        assert_equal(home(paged), home(plain))
        assert self.gradients_differ() == []

    def train(self, *xs):
        """Have both compute gradients of some inputs, which are the same bit for bit."""
        for x in xs:
            self.agree(lambda model, x=x: model(x).square().sum().backward())

    def gradients_differ(self):
        """The names of the parameters whose gradients are not equal bit for bit."""
        pairs = zip(self.host.named_parameters(), self.there.parameters(), strict=True)
        return [name for (name, p), q in pairs if not same(p.grad, q.grad)]

    def gradients_are_close(self):
        """Whether they are, where sums of several are of another order on the host."""
        pairs = zip(self.host.parameters(), self.there.parameters(), strict=True)
        return all(torch.allclose(p.grad, q.grad.cpu(), rtol=1e-4, atol=1e-6) for p, q in pairs)

    def values_differ(self):
        """The names of what the state dicts have that is not equal."""
        there = self.there.state_dict()
        mine = self.host.state_dict()
        return [name for name, value in mine.items() if not same(value, there[name])]


def same(one, other):
    """Whether a tensor on the host has the bits of one on the device; None is only None."""
    if one is None or other is None:
        return one is other
    return one.device.type == "cpu" and torch.equal(one, other.cpu())
