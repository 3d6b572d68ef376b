"""Arguments in containers of all kinds: moved, handed back, and named where left behind."""

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils import _pytree
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

from tenure.paging import page

from ..models import linears
from ..support import whole_output


class Named(NamedTuple):
    x: Any
    rest: Any = None


@dataclasses.dataclass
class Batch:
    x: Any
    rest: Any = None
    later: Any = dataclasses.field(default=None, init=False)


class Taking(nn.Linear):
    """Has what it is called with, and what it does with that."""

    def forward(self, tree):
        self.given = [tree]
        self.change(tree)


@pytest.fixture
def given(sim):
    """Return a function that calls a paged model, whose forward may change what it gets."""
    model = Taking(2, 2).eval().requires_grad_(False)

    def call(tree, change=lambda tree: None):
        model.change = change
        model(tree)
        return model.given.pop()

    with page(model, sim.device):
        yield call


def test_containers_are_made_anew_of_moved_tensors_and_the_callers_own_stay(sim, given):
    def tree_of(x):
        output = BaseModelOutput(last_hidden_state=x)
        return [{"a": [Batch((Named(x),))]}, output, BatchEncoding({"x": x}, n_sequences=1)]

    x = torch.ones(2)
    tree, there = tree_of(x), tree_of(x.to(sim.device))
    nested, output, encoding = given(tree)
    assert type(nested["a"][0]) is Batch
    assert type(nested["a"][0].x[0]) is Named
    assert type(output) is BaseModelOutput
    assert type(encoding) is BatchEncoding
    assert encoding.n_sequences == 1
    tensors = [nested["a"][0].x[0].x, output.last_hidden_state, encoding["x"]]
    assert {each.device for each in tensors} == {sim.device}
    assert tree[0]["a"][0].x[0].x is tree[1].last_hidden_state is tree[2]["x"] is x
    assert given(there) is there


def test_one_tensor_in_several_places_is_moved_once(sim, given):
    x = torch.ones(2)
    output = given(BaseModelOutput(last_hidden_state=x))
    assert output.last_hidden_state is output["last_hidden_state"] is output[0]
    batch = Batch(x)
    batch.later = [x]
    assert given(batch).later[0].device == sim.device
    found = given({"a": [x], "b": x, "packed": pack_sequence([torch.ones(3, 2)])})
    assert found["a"][0] is found["b"]
    assert found["packed"].data.device == sim.device
    assert found["packed"].batch_sizes.device.type == "cpu"


class Cache:
    def __init__(self, x):
        self.x = x


def test_an_object_is_left_alone_also_one_that_torchs_pytree_knows(given):
    _pytree.register_pytree_node(Cache, lambda c: ([c.x], None), lambda x, _: Cache(*x))
    try:
        cache = Cache(torch.ones(2))
        assert given([cache, torch.ones(2)])[0] is cache
        assert cache.x.device.type == "cpu"
    finally:
        _pytree.SUPPORTED_NODES.pop(Cache)


def test_what_is_put_into_a_container_arrives_in_the_callers(sim, given):
    x = torch.ones(2)
    tree = {"x": x, "list": [x], "gone": 1, "batch": Batch(x), "same": [1]}
    same, y = tree["same"], torch.ones(3, device=sim.device)

    def change(there):
        there["y"], there["list"][:] = y, [there["x"], y]
        there["batch"].rest = [there["x"]]
        del there["gone"]

    given(tree, change)
    assert list(tree) == ["x", "list", "batch", "same", "y"]
    assert tree["x"] is x
    assert tree["y"] is y
    assert tree["list"][0] is x
    assert tree["list"][1] is y
    assert tree["batch"].x is tree["batch"].rest[0] is x
    assert tree["same"] is same


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = linears(4)

    def forward(self, batch, *more, cache=None):
        x = batch.x if isinstance(batch, Cache | Batch) else batch["x"]
        out = self.layers(x)
        if cache is not None:
            cache["last"] = out
        return out


def fail(*_):
    raise RuntimeError("something else")


@pytest.mark.usefixtures("without_gradients")
def test_a_cache_in_a_dictionary_is_the_callers_and_what_is_left_behind_is_named(sim, x):
    model = Remembering().eval()
    expected = whole_output(sim.device, model, {"x": x})
    with page(model, sim.device, budget="16KiB"):
        for cache in ({}, {"last": x}):
            output = model(Batch(x), cache=cache)
            assert torch.equal(output.cpu(), expected)
            assert cache["last"] is output
        for args, name in [
            ((Cache(x),), "batch (float32["),
            (({"x": x.to("meta")},), "batch (float32["),
            ((Batch(x.to("meta")), Cache(x)), "batch (float32[4, 32] on meta, 512 B), more (float"),
        ]:
            with pytest.raises(RuntimeError) as caught:
                model(*args)
            (note,) = caught.value.__notes__
            told = "The model is paged to sim:0, and tensors in its arguments are elsewhere: "
            assert note.startswith(told + name)
        assert model({"x": x}).device == sim.device
        model.layers[1].register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="something else") as caught:
            model({"x": x}, Cache(x))
        assert not hasattr(caught.value, "__notes__")
