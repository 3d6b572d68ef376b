"""The state that a failed attempt changes, brought back."""

import random
import sys
import types
from collections import OrderedDict

import numpy.random
import pytest
import torch
from torch import nn

from tenure import NewDisposeScope, owner_of
from tenure.adaptive._undo._module_state import BufferState, ModuleState, modules_below
from tenure.adaptive._undo._rng_state import RngState, generators_in
from tenure.adaptive._undo._rollback import AllOf


def draw(generator):
    return (
        torch.rand(3).tolist(),
        random.random(),
        numpy.random.rand(),
        torch.rand(2, generator=generator).tolist(),
    )


def test_all_generators_draw_the_same_numbers_after_undo():
    generator = torch.Generator().manual_seed(5)
    state = RngState(generators=[generator])
    state.begin()
    first, second = draw(generator), draw(generator)
    state.undo()
    assert draw(generator) == first
    state.begin()
    state.finish()
    assert draw(generator) == second


def test_the_generator_of_the_device_is_restored(sim):
    state = RngState()
    state.begin()
    first = torch.rand(4, device="sim").cpu().tolist()
    state.undo()
    assert torch.rand(4, device="sim").cpu().tolist() == first


def test_buffers_get_their_values_and_their_tensors_back():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Module())
    model[1].register_buffer("table", torch.ones(3))
    model[1].register_buffer("nothing", None)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors = dict(model.named_buffers())
    state = BufferState(modules_below([model, model[0]]))
    state.begin()
    model[0](torch.randn(4, 2))
    model[1].table = torch.zeros(3)
    model[1].nothing = torch.zeros(1)
    state.undo()
    assert dict(model.named_buffers()) == tensors
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_a_graph_of_before_the_attempt_can_still_go_backward():
    model = nn.Module()
    model.register_buffer("scale", torch.tensor([2.0, 3.0]))
    weight = torch.ones(2, requires_grad=True)
    loss = (weight * model.scale).sum()
    state = BufferState([model])
    state.begin()
    model.scale.zero_()
    state.undo()
    loss.backward()
    assert weight.grad.tolist() == [2.0, 3.0]


def test_buffers_made_in_inference_mode_are_restored():
    model = nn.Module()
    with torch.inference_mode():
        model.register_buffer("count", torch.zeros(2))
    state = BufferState([model])
    state.begin()
    with torch.inference_mode():
        model.count.add_(1)
    state.undo()
    assert model.count.tolist() == [0, 0]


def test_the_copies_of_buffers_belong_to_no_scope_and_go_after_success():
    state = BufferState([nn.BatchNorm1d(2)])
    with NewDisposeScope() as scope:
        state.begin()
        assert len(scope) == 0
        assert owner_of(state._buffers[0].note.copy) is None
    state.finish()
    assert state._buffers == []


class Part:
    def __init__(self, log, name, fails_in=()):
        self.log, self.name, self.fails_in = log, name, fails_in

    def _do(self, verb):
        self.log.append(f"{verb} {self.name}")
        if verb in self.fails_in:
            raise RuntimeError(f"{verb} {self.name}")

    def begin(self):
        self._do("begin")

    def finish(self):
        self._do("finish")

    def undo(self):
        self._do("undo")


def test_parts_begin_in_order_and_are_undone_backwards():
    log = []
    both = AllOf([Part(log, "a"), Part(log, "b")])
    both.begin()
    both.finish()
    both.undo()
    assert log == ["begin a", "begin b", "finish a", "finish b", "undo b", "undo a"]


def test_parts_that_began_are_undone_when_the_next_can_not_begin():
    log = []
    both = AllOf([Part(log, "a"), Part(log, "b", ["begin"]), Part(log, "c")])
    with pytest.raises(RuntimeError, match="begin b"):
        both.begin()
    assert log == ["begin a", "begin b", "undo a"]


def test_every_part_is_undone_although_one_fails():
    log = []
    both = AllOf([Part(log, "a"), Part(log, "b", ["undo"])])
    with pytest.raises(RuntimeError, match="undo b"):
        both.undo()
    assert log == ["undo b", "undo a"]


class Keeps(nn.Module):
    """Keeps what it computed as plain attributes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.mask = None
        self.by_length = {}
        self.seen = [1]
        self.n_calls = 0

    def forward(self, x):
        n = len(x)
        if self.mask is None or len(self.mask) < n:
            self.mask, self.late = torch.ones(n, 1), torch.ones(1)
            self.register_buffer("scale", torch.ones(3), persistent=False)
        if n not in self.by_length:
            self.by_length[n] = torch.ones(n, 1)
        self.seen.append(n)
        self.n_calls += 1
        return self.linear(x) * self.mask[:n] * self.by_length[n] * self.scale * self.late


def test_attributes_get_back_what_they_held():
    model = nn.Sequential(Keeps())
    keeps = model[0]
    state = ModuleState(modules_below([model]), with_modes=False)
    by_length, seen = keeps.by_length, keeps.seen
    state.begin()
    model(torch.ones(4, 3))
    state.undo()
    assert (keeps.mask, keeps.by_length, keeps.seen, keeps.n_calls) == (None, {}, [1], 0)
    assert keeps.by_length is by_length
    assert keeps.seen is seen
    assert not hasattr(keeps, "late")
    assert not hasattr(keeps, "scale")
    assert "scale" not in keeps._non_persistent_buffers_set
    state.begin()
    model(torch.ones(4, 3))
    state.finish()
    mask, late = keeps.mask, keeps.late
    state.begin()
    model(torch.ones(6, 3))
    state.undo()
    assert keeps.mask is mask
    assert keeps.late is late
    assert (list(keeps.by_length), keeps.n_calls) == ([4], 1)
    assert keeps.linear.weight is dict(model.named_parameters())["0.linear.weight"]


class Refusing(OrderedDict):
    """A dictionary as transformers returns them."""

    def update(self, *args, **kwargs):
        raise TypeError("You cannot use update on it")

    def copy(self):
        raise TypeError("You cannot use copy on it")


class NoName:
    def __repr__(self):
        raise AssertionError("a key may be a whole model")


def test_containers_with_methods_and_keys_of_their_own_get_their_items_back():
    keeps, key = Keeps(), NoName()
    keeps.last = Refusing(first=torch.ones(2), second=1)
    keeps.by_object = {key: torch.ones(2)}
    state = ModuleState([keeps], with_modes=False)
    state.begin()
    keeps.last["third"] = keeps.last.pop("first").add_(1)
    keeps.by_object[key].add_(1)
    state.undo()
    assert list(keeps.last) == ["first", "second"]
    assert keeps.last["first"].tolist() == [1, 1]
    assert keeps.by_object[key].tolist() == [1, 1]


def test_numpy_that_is_only_half_imported_has_no_generators_yet(monkeypatch):
    monkeypatch.setitem(sys.modules, "numpy.random", types.ModuleType("numpy.random"))
    generator = torch.Generator()
    assert generators_in([object(), generator, 3]) == [generator]


def test_a_generator_without_a_state_is_left_alone():
    state = RngState(generators=[random.SystemRandom()])
    state.begin()
    state.undo()
