"""Finding tensors in trees of every kind."""

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
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
        (A, (B,)),
        {"a": A, "b": [B]},
        Pair(A, Pair(B, 3)),
        Batch(A, B),
        collections.UserDict(a=A, b=B),
        collections.deque([A, B]),
        [A, A, [B, A], torch.Size([3]), "text", 5, None],
    ],
    ids=lambda tree: type(tree).__name__,
)
def test_each_tensor_is_found_once_and_in_order(tree):
    assert found_in(tree) == ids(A, B)


def test_registered_containers_wrappers_and_modules_are_taken_apart():
    _pytree.register_pytree_node(
        Registered, lambda node: ([node.child], None), lambda children, _: Registered(*children)
    )
    try:
        assert found_in(Registered([A, Registered(B)])) == ids(A, B)
    finally:
        _pytree.SUPPORTED_NODES.pop(Registered)
    wrapper, norm = TwoTensor(A, B), torch.nn.BatchNorm1d(2)
    assert found_in(wrapper) == ids(wrapper, A, B)
    assert found_in(norm) == ids(*norm.parameters(), *norm.buffers())


def test_cycles_and_depth_do_not_matter():
    tree: list[Any] = [A]
    tree += [tree, {"back": tree, "b": B}]
    assert found_in(tree) == ids(A, B)
    deep: Any = A
    for _ in range(100_000):
        deep = [deep]
    assert found_in(deep) == ids(A)


class RaisingMapping(collections.UserDict):
    def values(self):
        raise ValueError("mine")


def test_a_container_whose_code_raises_is_named_and_nothing_is_changed():
    with NewDisposeScope() as scope:
        tensor, hostile = torch.ones(1), RaisingMapping()
        for verb in (attach_to_scope, detach_from_scope, dispose, move_to_outer):
            with pytest.raises(
                ScopeUsageError,
                match=r"^A RaisingMapping could not be searched for tensors: its own code raised "
                r"ValueError\. Nothing was changed\. Pass the tensors in it instead\.$",
            ) as caught:
                verb([tensor, hostile])
            assert isinstance(caught.value.__cause__, ValueError)
            assert tensor in scope
            assert not is_disposed(tensor)


def test_hostile_objects_are_leaves():
    class Hostile:
        def __eq__(self, other):
            raise AssertionError

        __bool__ = __eq__
        __hash__ = None  # type: ignore[assignment]

    assert found_in([Hostile(), A]) == ids(A)
    with pytest.raises(ScopeUsageError, match="got a Hostile, which holds no tensor"):
        move_to_outer(Hostile())
