"""The state that a failed attempt changes, brought back."""

import random
from collections import OrderedDict, defaultdict, deque

import numpy.random
import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from tenure.adaptive import NoBatchsizeCache, step
from tenure.adaptive import range as range_of

from ..attempt.failures import oom
from ..unchanged import unchanged

DRAWS = {
    "torch": lambda *_: torch.rand(1).item(),
    "python": lambda *_: random.random(),
    "numpy": lambda *_: numpy.random.rand(),
    "an argument": lambda one, _: torch.rand(1, generator=one).item(),
    "an argument by name": lambda _, other: torch.rand(1, generator=other).item(),
}


@pytest.mark.parametrize(("restore_rng", "n_drawn"), [(True, 4), (False, 6)])
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_all_generators_draw_the_same_numbers_in_each_attempt_only_on_request(
    draw, restore_rng, n_drawn
):
    found = []

    @range_of(initial_step=4, restore_rng=restore_rng, cache_type=NoBatchsizeCache)
    def work(start, end, one, _, *, other):
        found.append(draw(one, other))
        if end - start > 1:
            oom()

    generators = [torch.Generator().manual_seed(5) for _ in range(2)]
    work(0, 4, generators[0], random.SystemRandom(), other=generators[1])
    # 4, 2 and 1 of the first piece, and each other piece at once
    assert len(found) == 6
    assert len(set(found[:3])) == n_drawn - 3
    assert len(set(found)) == n_drawn


def fail(model, change):
    """Make a change in a step that fails."""

    def fn(x):
        change(x)
        raise KeyError("stop")

    with unchanged(model), pytest.raises(KeyError, match="stop"):
        step(fn, torch.ones(4, 3), model=model)


def test_buffers_get_their_values_and_their_tensors_back():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Module())
    model[1].register_buffer("table", torch.ones(3))
    model[1].register_buffer("nothing", None)
    with torch.inference_mode():
        model[1].register_buffer("count", torch.zeros(2))
    tensors = dict(model.named_buffers())

    def change(x):
        model[0](x)
        model[1].table = torch.zeros(3)
        model[1].nothing = torch.zeros(1)
        with torch.inference_mode():
            model[1].count.add_(1)

    fail(model, change)
    assert dict(model.named_buffers()) == tensors


def test_a_graph_of_before_the_attempt_can_still_go_backward():
    model = nn.Module()
    model.register_buffer("scale", torch.tensor([2.0, 3.0]))
    weight = torch.ones(2, requires_grad=True)
    loss = (weight * model.scale).sum()
    fail(model, lambda x: model.scale.zero_())
    loss.backward()
    assert weight.grad.tolist() == [2.0, 3.0]


class Stuck(random.Random):
    """A generator whose state can be read and not set."""

    def setstate(self, state):
        raise ValueError("stuck")


def test_every_kind_of_state_is_undone_although_one_fails():
    model, numbers = nn.BatchNorm1d(3), Stuck(5)
    model.weight.grad = torch.ones(3)

    def fn(x):
        model(x)
        numbers.random()
        raise KeyError("stop")

    with unchanged(model), pytest.raises(ValueError, match="stuck"):
        step(fn, torch.ones(4, 3), model=model)


class NoName:
    def __repr__(self):
        raise AssertionError("a key may be a whole model")


class Named(OrderedDict):
    """A container whose class wants another argument than items."""

    def __init__(self, name):
        super().__init__()
        self.name = name


class Keeps(nn.Module):
    """Keeps what it computed as plain attributes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.mask, self.n_calls, self.total = None, 0, torch.zeros(())
        self.key = NoName()
        self.by_object = {self.key: torch.ones(2)}
        self.inner = {"train": {"sizes": [1], "sum": torch.zeros(())}}
        self.recent, self.shapes = deque([1], maxlen=3), {1}
        self.pair = torch.zeros(()), {}
        self.named, self.lists = Named("a"), defaultdict(list)
        # keeps its items as attributes, too
        self.output = BaseModelOutput(last_hidden_state=torch.zeros(3))
        self.loop = [1]
        self.loop.append(self.loop)

    def forward(self, x):
        n, train = len(x), self.inner["train"]
        if self.mask is None or len(self.mask) < n:
            self.mask, self.late = torch.ones(n, 1), torch.ones(1)
            self.register_buffer("scale", torch.ones(3), persistent=False)
        for tensor in (self.by_object[self.key], train["sum"], self.pair[0], self.total):
            tensor.add_(n)
        for numbers in (train["sizes"], self.recent, self.loop):
            numbers.append(n)
        self.shapes.add(n)
        self.output["last_hidden_state"] = torch.ones(n)
        for items in (self.pair[1], self.named, self.lists):
            items[n] = True
        self.n_calls += 1
        return self.linear(x) * self.mask[:n] * self.scale * self.late


def test_attributes_get_back_what_they_held():
    model = nn.Sequential(Keeps())
    keeps = model[0]
    held, output = dict(vars(keeps)), keeps.output.last_hidden_state
    fail(model, model)
    assert vars(keeps).keys() == held.keys()
    assert all(vars(keeps)[name] is value for name, value in held.items())
    train = keeps.inner["train"]
    assert (train["sizes"], keeps.recent, keeps.recent.maxlen) == ([1], deque([1]), 3)
    assert (keeps.shapes, keeps.pair[1], len(keeps.loop)) == ({1}, {}, 2)
    assert (list(keeps.named), list(keeps.lists)) == ([], [])
    assert keeps.output["last_hidden_state"] is keeps.output.last_hidden_state is output
    assert keeps.loop[1] is keeps.loop
    assert keeps.by_object[keeps.key].tolist() == [1, 1]
    assert (float(train["sum"]), float(keeps.pair[0]), float(keeps.total)) == (0, 0, 0)
    assert not hasattr(keeps, "scale")
    assert "scale" not in keeps._non_persistent_buffers_set
    model(torch.ones(4, 3))
    mask, late = keeps.mask, keeps.late
    fail(model, lambda x: model(torch.ones(6, 3)))
    assert keeps.mask is mask
    assert keeps.late is late
    assert keeps.n_calls == 1
    assert keeps.linear.weight is dict(model.named_parameters())["0.linear.weight"]
