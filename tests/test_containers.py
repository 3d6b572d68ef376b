"""One level of containers of every kind, and trees of them with objects replaced.

By private names, because what users see of a container is only that its tensors were found.
"""

import collections
import dataclasses
import types
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils import _pytree

from tenure import TenureError
from tenure._containers import Survey, contents_of, entries_of, is_mutable, level_of, set_entries


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class Batch:
    x: Any
    y: Any
    late: Any = dataclasses.field(init=False, repr=False, compare=False)


@dataclasses.dataclass
class Registered:
    x: Any
    hidden: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: Any
    y: Any


class Marked(list):
    mark = None


MARKED = Marked([1, 2])
MARKED.mark = "kept"


class Settings(dict):
    """A mapping whose items are its attributes."""

    def __init__(self, **items):
        super().__init__(items)
        self.__dict__ = self


@pytest.fixture
def registered():
    _pytree.register_pytree_node(
        Registered,
        lambda node: ([node.x], node.hidden),
        lambda children, hidden: Registered(*children, hidden),
    )
    yield Registered
    _pytree.SUPPORTED_NODES.pop(Registered)


CONTAINERS = {
    "list": [1, 2],
    "tuple": (1, 2),
    "namedtuple": Pair(1, 2),
    "deque": collections.deque([1, 2], 3),
    "dict": {"x": 1, "y": 2},
    "defaultdict": collections.defaultdict(list, x=1, y=2),
    "OrderedDict": collections.OrderedDict(y=1, x=2),
    "UserDict": collections.UserDict(x=1, y=2),
    "settings": Settings(x=1, y=2),
    "dataclass": Batch(1, 2),
    "slotted": Slotted(1, 2),
    "marked": MARKED,
}


@pytest.mark.parametrize("node", CONTAINERS.values(), ids=CONTAINERS)
def test_a_level_is_taken_apart_and_made_again_of_other_children(node):
    level = level_of(node)
    assert level.children == contents_of(node) == [1, 2]
    assert level_of(level.make([3, 4])).children == [3, 4]
    assert level.make([1, 2]) == node
    assert type(level.make([3, 4])) is type(node)
    assert level.children == contents_of(node) == [1, 2]
    if is_mutable(node):
        # entries that are there already are not touched
        before = entries_of(node)
        set_entries(node, before)
        assert entries_of(node) == before


def test_a_level_keeps_what_its_class_has_beside_the_children():
    assert level_of(CONTAINERS["deque"]).make([3, 4]).maxlen == 3
    assert level_of(CONTAINERS["defaultdict"]).make([3, 4])["z"] == []
    assert level_of(CONTAINERS["settings"]).make([3, 4]).y == 4
    assert level_of(MARKED).make([3, 4]).mark == "kept"


def test_what_is_registered_is_taken_apart_as_registered_and_read_whole(registered):
    node = registered(1, 2)
    assert level_of(node).children == [1]
    assert level_of(node).make([3]) == registered(3, 2)
    assert contents_of(node) == [1, 2]
    assert not is_mutable(node)


@pytest.mark.parametrize(
    ("node", "contents"),
    [
        *(({1}, [1]), (frozenset({1}), [1]), (types.MappingProxyType({"x": 1}), [1])),
        *((other, []) for other in (1, "ab", None, Batch, torch.ones(2), torch.nn.Linear(1, 1))),
    ],
)
def test_what_can_not_be_made_again_is_read_and_other_objects_are_no_containers(node, contents):
    assert level_of(node) is None
    assert contents_of(node) == contents
    assert not is_mutable(node)


def test_a_tree_has_one_replacement_for_an_object_and_what_leads_to_none_stands_for_itself():
    old, new, apart = object(), object(), [1]
    pair, settings = {"a": (old, "b")}, Settings(x=old)
    made = Survey([pair, (pair, old), settings, apart]).replaced({id(old): new})
    assert made[0] == {"a": (new, "b")}
    assert made[1] == (made[0], new)
    assert made[1][0] is made[0]
    assert made[2].x is made[2]["x"] is new
    assert made[3] is apart
    assert (pair, settings.x) == ({"a": (old, "b")}, old)


def test_a_container_that_holds_itself_can_not_be_made_again():
    ring = [1, object()]
    ring.append((ring,))
    assert Survey(ring).replaced({}) is ring
    with pytest.raises(TenureError, match="A list holds itself"):
        Survey(ring).replaced({id(ring[1]): 2})
