"""Only what the code of a function names counts as a part of the step."""

import functools
import types
import weakref

import pytest
import torch
from torch import nn

from tenure.adaptive._reachable import Reachable


def test_a_variable_of_the_same_name_as_an_attribute_is_not_reached():
    space = {"model": nn.Linear(1, 1), "x": torch.ones(1, requires_grad=True)}
    exec("def fn(b):\n    return b.model(b.x)", space)
    found = Reachable(space["fn"])
    assert (found.modules, found.tensors) == ({}, {})


def test_attributes_that_the_method_does_not_name_are_not_reached():
    class Trainer:
        def __init__(self):
            self.generator, self.discriminator = nn.Linear(1, 1), nn.Linear(1, 1)
            self.rate = torch.ones(1, requires_grad=True)

        def loss(self, b):
            return self.helper(b) * self.rate

        def helper(self, b):
            return self.generator(b)

    trainer = Trainer()
    found = Reachable(trainer.loss)
    assert list(found.modules.values()) == [trainer.generator]
    assert found.captured() == [trainer.rate]


def test_modules_of_a_python_module_are_reached_by_the_names_used():
    models = types.ModuleType("models")
    models.net, models.other = nn.Linear(1, 1), nn.Linear(1, 1)
    space = {"models": models}
    exec("def fn(b):\n    return models.net(b)", space)
    assert Reachable(space["fn"]).modules == {"models.net": models.net}


def test_defaults_wrappers_and_partials_are_looked_through():
    first, second, third = nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)

    def fn(b, net=first, *, head=second):
        return head(net(b))

    @functools.wraps(fn)
    def wrapper(*args):
        return fn(*args)

    found = Reachable(functools.partial(wrapper, extra=third))
    assert set(found.modules.values()) == {first, second, third}


class _Slotted:
    __slots__ = ("net", "unset")

    def __init__(self, net):
        self.net = net

    def loss(self, b):
        return self.net(b) + self.unset


class _Properties:
    def __init__(self, net):
        self._net = net

    @property
    def net(self):
        return self.cached

    @functools.cached_property
    def cached(self):
        return self._net

    def loss(self, b):
        return self.net(b)


def _of_class(net):
    class OfClass:
        model, other = net, nn.Linear(1, 1)

        @classmethod
        def by_class(cls, b):
            return cls.model(b)

        @staticmethod
        def by_name(b):
            return OfClass.model(b)

        def by_object(self, b):
            return self.model(b)

    return OfClass


def _cached(net):
    get = functools.cache(lambda: net)
    return lambda b: get()(b)


def _weak(net):
    reference = weakref.ref(net)
    return lambda b: reference()(b)


@pytest.mark.parametrize(
    "make",
    [
        lambda net: _Slotted(net).loss,
        lambda net: _Properties(net).loss,
        lambda net: _of_class(net).by_class,
        lambda net: _of_class(net).by_name,
        lambda net: _of_class(net)().by_object,
        _cached,
        _weak,
    ],
)
def test_modules_are_reached_through_slots_properties_classes_caches_and_references(make):
    net = nn.Linear(1, 1)
    assert list(Reachable(make(net)).modules.values()) == [net]


def test_tensors_with_a_graph_are_told_from_leaves():
    leaf = torch.ones(2, requires_grad=True)
    computed = leaf * 2
    constant = torch.ones(2)
    found = Reachable(lambda b: b * leaf * computed * constant)
    assert found.captured() == [leaf]
    assert found.computed() == ["computed"]


def test_cycles_and_unset_variables_do_no_harm():
    loop = []
    loop.append(loop)

    def fn(b):
        return later(loop, fn, b)

    assert Reachable(fn, None).modules == {}

    def later(*_):
        return None


def test_the_numbers_of_a_key_are_not_printed():
    class Key(nn.Parameter):
        def __repr__(self):
            raise AssertionError("printed")

    rates = {Key(torch.ones(1)): torch.ones(1, requires_grad=True)}
    assert Reachable(lambda b: b * rates).tensors == {"rates[<Key>]": next(iter(rates.values()))}
