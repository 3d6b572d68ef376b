"""Containers that the CPU fallback moves: dataclasses, and those that contain themselves."""

import dataclasses
from typing import Any

import pytest
import torch

from tenure import TenureError
from tenure.adaptive._attempt._cpu_fallback import on_cpu


@pytest.fixture
def x(sim):
    return torch.ones(4).to(sim.device)


def values(tensor):
    return tensor.cpu().tolist()


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
    assert values(made.hidden) == [2.0] * 4


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
