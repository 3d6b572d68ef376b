"""Finding tensors in trees of every kind."""

import collections
import dataclasses
import weakref
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
from tenure.scopes._ledger import enter
from tenure.scopes._trees import given_back, required_tensors, tensors_in


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


def same(found, expected):
    return [id(t) for t in found] == [id(t) for t in expected]


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
    assert same(tensors_in((tree,)), [A, B])


def test_a_registered_container_is_taken_apart(registered):
    assert same(tensors_in((registered([A, registered(B)]),)), [A, B])


def test_a_packed_sequence_is_found_whole():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    assert same(tensors_in((packed,)), [packed.data, packed.batch_sizes])


def test_a_wrapper_brings_its_inner_tensors():
    wrapper = Wrapper(A)
    assert same(tensors_in((wrapper,)), [wrapper, A])


def test_a_module_stands_for_its_parameters_and_buffers():
    norm = torch.nn.BatchNorm1d(2)
    assert same(tensors_in((norm,)), [*norm.parameters(), *norm.buffers()])


def test_a_cycle_ends():
    tree: list[Any] = [A]
    tree.append(tree)
    tree.append({"back": tree, "b": B})
    assert {id(t) for t in tensors_in((tree,))} == {id(A), id(B)}


def test_depth_does_not_matter():
    tree: Any = A
    for _ in range(100_000):
        tree = [tree]
    assert same(tensors_in((tree,)), [A])


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
    wrapper = RaisingWrapper(torch.ones(1))
    assert not is_disposed(wrapper)
    with NewDisposeScope() as scope:
        enter(scope._ledger, weakref.ref(wrapper))
        assert scope.live_bytes == 0
    assert is_disposed(wrapper)


def test_hostile_objects_are_leaves():
    class Hostile:
        def __eq__(self, other):
            raise AssertionError

        def __bool__(self):
            raise AssertionError

        def __getattr__(self, name):
            raise AttributeError(name)

        __hash__ = None  # type: ignore[assignment]

    assert same(tensors_in(([Hostile(), A],)), [A])
    with pytest.raises(ScopeUsageError, match="got a Hostile, which holds no tensor"):
        required_tensors((Hostile(),), "call()")


def test_an_object_whose_type_has_no_hash_is_a_leaf():
    class Meta(type):
        def __eq__(cls, other):
            raise AssertionError

    class Odd(metaclass=Meta):
        pass

    assert same(tensors_in(([Odd(), A],)), [A])
    with pytest.raises(ScopeUsageError, match="got a Odd, which holds no tensor"):
        required_tensors((Odd(),), "call()")


trees = st.recursive(
    st.sampled_from([A, B, 1, None]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
)


@given(trees)
def test_what_is_found_is_what_pytree_finds(tree):
    leaves = [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    assert {id(t) for t in tensors_in((tree,))} == {id(leaf) for leaf in leaves}


def test_one_argument_is_given_back_alone():
    assert given_back((A,)) is A
    assert given_back((A, B)) == (A, B)
    assert given_back(()) == ()
