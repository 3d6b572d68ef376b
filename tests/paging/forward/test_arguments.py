"""Arguments in containers of all kinds: moved, handed back, and named where left behind."""

import collections
import copy
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils import _pytree
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

from tenure.paging import PagingError, page
from tenure.paging._forward._arguments import Arguments, moved

from ..models import WIDTH

META = torch.device("meta")


class Named(NamedTuple):
    x: Any
    rest: Any = None


@dataclasses.dataclass
class Batch:
    x: Any
    rest: Any = None
    later: Any = dataclasses.field(default=None, init=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Any


class Marked(list):
    mark = None


def marked(x):
    made = Marked([x])
    made.mark = "kept"
    return made


def encoding(x):
    return BatchEncoding({"x": x}, n_sequences=1)


MAKERS = {
    "list": lambda x: [x],
    "tuple": lambda x: (x, 1),
    "dict": lambda x: {"x": x},
    "named": Named,
    "ordered": lambda x: collections.OrderedDict(x=x, y=1),
    "default": lambda x: collections.defaultdict(list, x=x),
    "user": lambda x: collections.UserDict(x=x),
    "deque": lambda x: collections.deque([x], maxlen=3),
    "dataclass": Batch,
    "frozen": Frozen,
    "marked": marked,
    "output": lambda x: BaseModelOutput(last_hidden_state=x),
    "encoding": encoding,
    "deep": lambda x: {"a": [Batch((Named(x),))]},
}


def tensors_in(node):
    if isinstance(node, torch.Tensor):
        return [node]
    if isinstance(node, dict | collections.UserDict):
        node = list(node.values())
    elif dataclasses.is_dataclass(node):
        node = [getattr(node, field.name) for field in dataclasses.fields(node)]
    if isinstance(node, list | tuple | collections.deque):
        return [tensor for each in node for tensor in tensors_in(each)]
    return []


@pytest.mark.parametrize("name", MAKERS)
def test_a_container_keeps_its_class_and_the_callers_own_stays_as_it_is(name):
    x = torch.ones(2)
    tree = MAKERS[name](x)
    found = moved(tree, "cpu", META)
    assert type(found) is type(tree)
    assert [each.device for each in tensors_in(found)] == [META]
    assert [each is x for each in tensors_in(tree)] == [True]


def test_what_is_set_on_a_container_stays():
    x = torch.ones(2)
    assert moved(MAKERS["marked"](x), "cpu", META).mark == "kept"
    assert moved(MAKERS["default"](x), "cpu", META).default_factory is list
    assert moved(MAKERS["deque"](x), "cpu", META).maxlen == 3
    assert moved(encoding(x), "cpu", META).n_sequences == 1
    output = moved(MAKERS["output"](x), "cpu", META)
    assert output.last_hidden_state is output["last_hidden_state"] is output[0]
    batch = Batch(x)
    batch.later = [x]
    assert moved(batch, "cpu", META).later[0].device == META


@pytest.mark.parametrize("name", MAKERS)
def test_a_container_without_anything_to_move_is_passed_itself(name):
    tree = MAKERS[name](torch.ones(2, device=META))
    assert moved(tree, "cpu", META) is tree


def test_a_tensor_that_is_given_twice_is_one_there():
    x = torch.ones(2)
    found = moved({"a": [x], "b": x}, "cpu", META)
    assert found["a"][0] is found["b"]


def test_a_packed_sequence_keeps_its_lengths_on_the_host():
    found = moved([pack_sequence([torch.ones(3, 2)])], "cpu", META)
    assert found[0].data.device == META
    assert found[0].batch_sizes.device.type == "cpu"


class Cache:
    def __init__(self, x):
        self.x = x


def test_an_object_is_left_alone_also_one_that_torchs_pytree_knows():
    _pytree.register_pytree_node(Cache, lambda c: ([c.x], None), lambda x, _: Cache(*x))
    try:
        cache = Cache(torch.ones(2))
        found = moved([cache, torch.ones(2)], "cpu", META)
        assert found[0] is cache
        assert cache.x.device.type == "cpu"
    finally:
        _pytree.SUPPORTED_NODES.pop(Cache)


def test_what_is_put_into_a_container_arrives_in_the_callers():
    x = torch.ones(2)
    tree = {"x": x, "list": [x], "gone": 1, "batch": Batch(x), "same": [1]}
    same = tree["same"]
    arguments = Arguments(tree, "cpu", META)
    given = arguments.given
    y = torch.ones(3, device=META)
    given["y"], given["list"][:] = y, [given["x"], y]
    given["batch"].rest = [given["x"]]
    del given["gone"]
    arguments.hand_back()
    assert list(tree) == ["x", "list", "batch", "same", "y"]
    assert tree["x"] is x
    assert tree["y"] is y
    assert tree["list"][0] is x
    assert tree["list"][1] is y
    assert tree["batch"].x is tree["batch"].rest[0] is x
    assert tree["same"] is same


def test_what_is_put_into_one_of_many_containers_arrives_in_no_other():
    x = torch.ones(2)
    tree = [{"x": x, "n": n} for n in range(50)]
    arguments = Arguments(tree, "cpu", META)
    for n, given in enumerate(arguments.given):
        given["y"] = n
    arguments.hand_back()
    assert tree == [{"x": x, "n": n, "y": n} for n in range(50)]


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, batch, *more, cache=None):
        x = batch.x if isinstance(batch, Cache | Batch) else batch["x"]
        out = self.layers(x)
        if cache is not None:
            cache["last"] = out
        return out


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Remembering().eval()


@pytest.mark.usefixtures("without_gradients")
def test_a_cache_in_a_dictionary_is_the_callers(sim, model, x):
    expected = copy.deepcopy(model).to(sim.device)(Batch(x.to(sim.device)))
    with page(model, sim.device, budget="16KiB"):
        for cache in ({}, {"last": x}):
            output = model(Batch(x), cache=cache)
            assert torch.equal(output, expected)
            assert cache["last"] is output


@pytest.mark.usefixtures("without_gradients")
def test_an_argument_that_is_left_behind_is_named_in_the_error(sim, model, x):
    with page(model, sim.device, budget="16KiB"):
        for args, name in [
            ((Cache(x),), "batch.x"),
            (({"x": [Cache(x)]},), None),
            (({"x": x.to("meta")},), "batch['x']"),
        ]:
            with pytest.raises((RuntimeError, TypeError)) as caught:
                model(*args)
            notes = getattr(caught.value, "__notes__", [])
            told = f"The model is paged to sim:0, and of its arguments {name} is float32[4, 32] on "
            assert [note.startswith(told) for note in notes] == [True] * (name is not None)
        assert model({"x": x}).device == sim.device


@pytest.mark.usefixtures("without_gradients")
def test_an_error_that_is_not_about_devices_gets_no_note(sim, model, x):
    def fail(*_):
        raise RuntimeError("something else")

    with page(model, sim.device, budget="16KiB"):
        model.layers[1].register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="something else") as caught:
            model({"x": x}, Cache(x))
        assert not hasattr(caught.value, "__notes__")


@pytest.mark.usefixtures("without_gradients")
def test_an_error_that_was_handled_before_the_call_gets_no_note(sim, model, x):
    def fail_and_call():
        try:
            raise RuntimeError("about a device")
        finally:
            model({"x": x}, Cache(x))

    with page(model, sim.device, budget="16KiB"):
        with pytest.raises(RuntimeError, match="about a device") as caught:
            fail_and_call()
        assert not hasattr(caught.value, "__notes__")


def test_pagings_own_errors_get_no_note(sim, model, x):
    with page(model, sim.device, budget="16KiB"):
        model.train()
        with pytest.raises(PagingError) as caught:
            model({"x": x}, Cache(x))
        assert not hasattr(caught.value, "__notes__")
