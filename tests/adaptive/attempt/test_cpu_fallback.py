"""A function that runs on the CPU: what it writes and returns comes back to the device."""

import contextlib
import copy
from collections import OrderedDict, defaultdict, deque

import pytest
import torch

from tenure.adaptive._attempt._cpu_fallback import on_cpu


class Batch(dict):
    """A mapping as other libraries return it: attributes of its own, and of its keys."""

    def __getattr__(self, name):
        if name not in self:
            raise AttributeError(name)
        return self[name]


@pytest.fixture
def x(sim):
    return torch.ones(3).to(sim.device)


# --- inference mode


def test_what_is_written_in_inference_mode_comes_back(sim, x):
    with torch.inference_mode():
        made_inside = torch.ones(3).to(sim.device)

        def f(a, b):
            a.add_(1)
            return b.add_(2)

        assert on_cpu(f, made_inside, x) is x
    assert made_inside.cpu().tolist() == [2.0] * 3
    assert x.cpu().tolist() == [3.0] * 3


def test_a_tensor_of_inference_is_written_outside_too(sim):
    with torch.inference_mode():
        x = torch.ones(3).to(sim.device)
    on_cpu(lambda a: a.add_(1), x)
    assert x.cpu().tolist() == [2.0] * 3


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.inference_mode])
def test_what_is_only_read_keeps_its_version_for_the_graphs_that_saved_it(x, mode):
    version = x._version
    with mode():
        on_cpu(lambda a: a.sum(), x)
    assert x._version == version


# --- containers


def test_what_is_written_into_a_container_without_tensors_of_the_device_is_there(x):
    found, sizes, host = [], {}, [torch.zeros(1)]

    def f(tensor, found, sizes, host):
        assert host[0].device.type == "cpu"
        found.append(tensor * 2)
        sizes["n"] = len(tensor)
        host.append(5)

    kept = host[0]
    on_cpu(f, x, found, sizes, host)
    assert found[0].device == x.device
    assert found[0].cpu().tolist() == [2.0] * 3
    assert sizes == {"n": 3}
    assert host[0] is kept
    assert host[1] == 5


def test_what_is_written_into_a_container_of_tensors_of_the_device_is_there(x):
    items, state, recent = [x, "a"], {"x": x, "old": 1, "in": [x]}, deque([x], maxlen=2)
    inner = state["in"]

    def f(items, state, recent):
        assert items[0] is state["x"] is state["in"][0] is recent[0]
        assert items[0].device.type == "cpu"
        items.append(items[0] + 1)
        state["new"] = items[0]
        del state["old"]
        state["in"][0] = 7
        recent.extend([1, 2])
        return items

    assert on_cpu(f, items, state, recent) is items
    assert items[0] is x
    assert items[2].device == x.device
    assert list(state) == ["x", "in", "new"]
    assert state["x"] is state["new"] is x
    assert state["in"] is inner
    assert inner == [7]
    assert list(recent) == [1, 2]


def test_a_container_that_is_given_twice_is_one(x):
    items = [x]
    on_cpu(lambda one, other: one.append(other is one), items, items)
    assert items[0] is x
    assert items[1:] == [True]


def ordered(x):
    return OrderedDict(a=x, b=1)


def with_default(x):
    return defaultdict(list, a=x, b=1)


def of_another_library(x):
    return Batch(a=x, b=1)


@pytest.mark.parametrize("make", [ordered, with_default, of_another_library])
def test_mappings_of_all_kinds_are_moved_and_stay_what_they_are(x, make):
    given = make(x)
    same = copy.copy(given)

    def f(mapping):
        assert type(mapping) is type(given)
        assert mapping["a"].device.type == "cpu"
        mapping["b"] = 2
        result = copy.copy(mapping)
        result["a"] = result["a"] * 3
        return result

    result = on_cpu(f, given)
    assert type(result) is type(given)
    assert result["a"].device == x.device
    assert given["a"] is same["a"]
    assert given["b"] == 2
    assert getattr(result, "default_factory", None) is getattr(given, "default_factory", None)


def test_named_results_of_torch_are_moved_and_stay_named(sim, x):
    top = torch.arange(6.0).view(2, 3).max(0)
    given = type(top)([each.to(sim.device) for each in top])

    def f(given):
        assert given.values.device.type == given.indices.device.type == "cpu"
        return given, torch.linalg.qr(torch.eye(2)), torch.Size([2])

    back, qr, size = on_cpu(f, given)
    assert type(back) is type(top)
    assert back.values is given.values
    assert type(qr) is torch.return_types.linalg_qr
    assert qr.Q.device == x.device
    assert size == (2,)
    assert type(size) is torch.Size
