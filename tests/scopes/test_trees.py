"""Finding tensors in trees of every kind."""

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree

from tenure import (
    NewDisposeScope,
    ScopeUsageError,
    attach_to_scope,
    detach_from_scope,
    dispose,
    is_disposed,
    move_to_outer,
)


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Batch:
    x: Any
    y: Any = None
    late: Any = dataclasses.field(init=False)


class Registered:
    def __init__(self, child):
        self.child = child


class Wrapper(torch.Tensor):
    """A wrapper subclass with one inner tensor."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("a tree walk computes nothing")


@pytest.fixture
def registered():
    _pytree.register_pytree_node(
        Registered, lambda node: ([node.child], None), lambda children, _: Registered(*children)
    )
    yield Registered
    _pytree.SUPPORTED_NODES.pop(Registered)


def found_in(tree):
    """The tensors that a scope takes with a tree, by identity and in order."""
    with NewDisposeScope() as scope:
        assert scope.attach(tree) is tree
        found = list(map(id, scope.owned()))
        scope.detach(tree)
        assert len(scope) == 0
    return found


def ids(*tensors):
    return list(map(id, tensors))


A, B = torch.ones(1), torch.zeros(1)


@pytest.mark.parametrize(
    "tree",
    [
        [A, B],
        (A, (B,)),
        {"a": A, "b": [B]},
        Pair(A, Pair(B, 3)),
        Batch(A, B),
        collections.OrderedDict(a=A, b=B),
        collections.UserDict(a=A, b=B),
        collections.deque([A, B]),
        [A, A, [B, A]],
        [A, B, torch.Size([3]), "text", 5, None],
    ],
    ids=lambda tree: type(tree).__name__,
)
def test_each_tensor_is_found_once_and_in_order(tree):
    assert found_in(tree) == ids(A, B)


def test_a_registered_container_is_taken_apart(registered):
    assert found_in(registered([A, registered(B)])) == ids(A, B)


def test_a_packed_sequence_is_found_whole():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    assert found_in(packed) == ids(packed.data, packed.batch_sizes)


def test_a_wrapper_brings_its_inner_tensors():
    wrapper = Wrapper(A)
    assert found_in(wrapper) == ids(wrapper, A)


def test_a_module_stands_for_its_parameters_and_buffers():
    norm = torch.nn.BatchNorm1d(2)
    assert found_in(norm) == ids(*norm.parameters(), *norm.buffers())


def test_a_cycle_ends():
    tree: list[Any] = [A]
    tree += [tree, {"back": tree, "b": B}]
    assert found_in(tree) == ids(A, B)


def test_depth_does_not_matter():
    tree: Any = A
    for _ in range(100_000):
        tree = [tree]
    assert found_in(tree) == ids(A)


class RaisingMapping(collections.UserDict):
    def values(self):
        raise ValueError("mine")


class RaisingClass:
    @property
    def __class__(self):
        raise ValueError("mine")


class RaisingWrapper(Wrapper):
    def __tensor_flatten__(self):
        raise ValueError("mine")


@pytest.mark.parametrize(
    "make",
    [RaisingMapping, RaisingClass, lambda: RaisingWrapper(torch.ones(1))],
    ids=["mapping", "class", "wrapper"],
)
@pytest.mark.parametrize("verb", [attach_to_scope, detach_from_scope, dispose, move_to_outer])
def test_a_container_whose_code_raises_is_named_and_nothing_is_changed(make, verb):
    with NewDisposeScope() as scope:
        tensor, hostile = torch.ones(1), make()
        with pytest.raises(
            ScopeUsageError,
            match=rf"^A {type(hostile).__name__} could not be searched for tensors: its own code "
            r"raised ValueError\. Nothing was changed\. Pass the tensors in it instead\.$",
        ) as caught:
            verb([tensor, hostile])
        assert isinstance(caught.value.__cause__, ValueError)
        assert tensor in scope
        assert not is_disposed(tensor)


def test_a_wrapper_that_cannot_be_taken_apart_can_be_asked_about():
    assert not is_disposed(RaisingWrapper(torch.ones(1)))


def test_hostile_objects_are_leaves():
    class Hostile:
        def __eq__(self, other):
            raise AssertionError

        def __bool__(self):
            raise AssertionError

        def __getattr__(self, name):
            raise AttributeError(name)

        __hash__ = None  # type: ignore[assignment]

    assert found_in([Hostile(), A]) == ids(A)
    with pytest.raises(ScopeUsageError, match="got a Hostile, which holds no tensor"):
        move_to_outer(Hostile())


def test_an_object_whose_type_has_no_hash_is_a_leaf():
    class Meta(type):
        def __eq__(cls, other):
            raise AssertionError

    class Odd(metaclass=Meta):
        pass

    assert found_in([Odd(), A]) == ids(A)
    with pytest.raises(ScopeUsageError, match="got a Odd, which holds no tensor"):
        move_to_outer(Odd())


trees = st.recursive(
    st.sampled_from([A, B, 1, None]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
)


@given(trees)
def test_what_is_found_is_what_pytree_finds(tree):
    leaves = {id(leaf) for leaf in _pytree.tree_leaves([A, tree]) if isinstance(leaf, torch.Tensor)}
    assert set(found_in([A, tree])) == leaves
