"""A function that runs on the CPU: what it writes and returns comes back to the device."""

import contextlib
import copy
import dataclasses
from collections import OrderedDict, defaultdict, deque
from typing import Any

import pytest
import torch

from tenure import TenureError
from tenure.adaptive import AdaptiveUsageError, NoBatchsizeCache, batch

from .failures import oom


def on_cpu(function, *args):
    """Call a function that fits on the device at no size."""
    calls = []

    @batch(initial_batchsize=1, cpu_fallback=True, cache_type=NoBatchsizeCache)
    def work(size, *args):
        calls.append(size)
        return function(*args) if len(calls) > 1 else oom()

    return work(*args)


class Batch(dict):
    """A mapping as other libraries return it: attributes of its own, and of its keys."""

    def __getattr__(self, name):
        if name not in self:
            raise AttributeError(name)
        return self[name]


@pytest.fixture
def x(sim):
    return torch.ones(3).to(sim.device)


# --- tensors


def written(a):
    a.add_(1)


def resized(a):
    a.resize_(6)


def with_other_data(a):
    a.data = a.data[1:3].double()


def filled(a):
    torch.add(a, 1, out=a)


@pytest.mark.parametrize("made_in", [contextlib.nullcontext, torch.inference_mode])
@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.inference_mode])
@pytest.mark.parametrize("change", [written, resized, with_other_data, filled])
def test_a_write_into_a_tensor_is_refused_and_leaves_it_as_it_was(sim, change, mode, made_in):
    with made_in():
        x = torch.ones(3).to(sim.device)
    made = []

    def f(a, made):
        made.append(a + 1)
        change(a)

    match = r"writes into an argument, float32\[3\] on sim:0, 12 B, .* return what it computes"
    with mode(), pytest.raises(AdaptiveUsageError, match=match):
        on_cpu(f, x, made)
    assert x.cpu().tolist() == [1.0] * 3


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


def test_gradients_flow_to_arguments_that_share_memory(sim, x):
    weight = x.clone().requires_grad_()
    on_cpu(lambda a, b: a.sum() + 2 * b.sum(), weight, weight[:2]).backward()
    assert weight.grad.cpu().tolist() == [3.0, 3.0, 1.0]


def test_arguments_under_functions_of_torch_func_are_moved_as_they_are(x):
    grad = torch.func.grad(lambda a: on_cpu(lambda b: (b * b).sum(), a))(x)
    assert grad.cpu().tolist() == [2.0] * 3


def test_arguments_with_pending_conjugation_are_moved(sim):
    turned = torch.tensor([1j, 2j]).to(sim.device).conj()
    result = on_cpu(lambda a, none: a + 1, turned, turned[:0])
    assert result.cpu().tolist() == [1 - 1j, 1 - 2j]


# --- dataclasses


@dataclasses.dataclass
class State:
    hidden: Any
    note: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    hidden: torch.Tensor


def test_tensors_in_dataclasses_are_moved_and_what_is_written_comes_back(sim, x):
    state, host = State(x), State(None)

    def f(state, host, frozen):
        assert state.hidden is frozen.hidden
        assert state.hidden.device.type == "cpu"
        state.note = state.hidden * 2
        state.extra = [state.hidden]
        host.note = state.note
        return Frozen(state.hidden + 1), state, frozen

    frozen = Frozen(x)
    made, same_state, same_frozen = on_cpu(f, state, host, frozen)
    assert same_state is state
    assert same_frozen is frozen
    assert state.hidden is frozen.hidden is state.extra[0] is x
    assert state.note is host.note
    assert state.note.device == made.hidden.device == sim.device
    assert made.hidden.cpu().tolist() == [2.0] * 3


def test_an_attribute_that_is_deleted_inside_is_gone(x):
    state = State(x)
    state.extra = 1

    def f(state):
        del state.extra

    on_cpu(f, state)
    assert not hasattr(state, "extra")


# --- containers that contain themselves


def test_a_container_that_contains_itself_and_a_tensor_is_refused_before_the_call(x):
    items, empty = [x], []
    items.append((items, 1))
    empty.append(empty)
    assert on_cpu(lambda same: same, empty) is empty
    with pytest.raises(TenureError, match="A list holds itself"):
        on_cpu(pytest.fail, items)


def test_what_is_written_and_returned_is_one_object(x):
    items = [x]

    def f(items):
        made = [items[0] * 2]
        items += [made, made[0]]
        return made

    made = on_cpu(f, items)
    assert items[1] is made
    assert items[2] is made[0]
