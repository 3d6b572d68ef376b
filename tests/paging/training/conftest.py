"""Pairs of models that are trained side by side: one paged, one whole on the device."""

import copy

import pytest
import torch

from tenure.paging import page

from .blocks import mlp


class Pair:
    """A model to page, and the same one on the device.

    Attributes:
        host: the first.
        there: the second, which is never paged.
        handle: of the first, where a fixture has paged it.
        weight_bytes: of each.
    """

    def __init__(self, sim, model):
        self.sim, self.host = sim, model
        self.there = copy.deepcopy(model).to(sim.device)
        self.weight_bytes = sum(p.nbytes for p in model.parameters())

    def page(self, share=0.5, **options):
        """Page it to a share of its weights."""
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

    def train(self, *xs):
        """Have both compute gradients of some inputs, which are the same bit for bit."""
        for x in xs:
            self.run(lambda model, x=x: model(x).square().sum().backward())
            assert self.gradients_differ() == []

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


@pytest.fixture
def pair(sim):
    """Makes a pair."""

    def make(model=None):
        if model is None:
            torch.manual_seed(0)
            model = mlp()
        return Pair(sim, model)

    return make


on_host = pytest.mark.parametrize("halved", ["host"], indirect=True)
either_way = pytest.mark.parametrize("halved", [None, "host"], indirect=True)
"""With activations on the device, and on the host."""


@pytest.fixture
def halved(request, pair):
    """A pair whose first is paged to half of its weights."""
    both = pair()
    with both.page(activations=getattr(request, "param", None)) as handle:
        both.handle = handle
        yield both
