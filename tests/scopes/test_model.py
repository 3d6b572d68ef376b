"""Random programs against a model of ownership that is too simple to be wrong."""

import gc

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tenure import (
    NewDisposeScope,
    attach_to_scope,
    current_scope,
    detach_from_scope,
    dispose,
    is_disposed,
    move_to,
    move_to_outer,
    owner_of,
    persist,
    statistics,
)


class Item:
    """A tensor, its value, and what the model says of it."""

    def __init__(self, value, tensor, owner, base=None):
        self.value, self.tensor, self.owner, self.base = value, tensor, owner, base
        self.disposed = False


def of_items(change):
    return precondition(lambda self: self.items)(rule(data=st.data())(change))


class Ownership(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        gc.collect()
        statistics().reset()
        self.scopes = []  # open, outermost first
        self.current = None
        self.outer = {}
        self.items = []
        self.counts = dict.fromkeys(
            ["created", "disposed", "released", "attached", "detached", "outside"], 0
        )

    def teardown(self):
        while self.scopes:
            self.scopes.pop().close()
        assert torch._C._len_torch_function_stack() == 0

    def pick(self, data):
        return data.draw(st.sampled_from(self.items))

    def nearest_open(self, scope):
        while scope is not None and scope not in self.scopes:
            scope = self.outer[scope]
        return scope

    def let_go(self, item):
        if not item.disposed:
            item.disposed = True
            self.counts["disposed" if item.owner is not None else "outside"] += 1
        item.owner = None

    def set_free(self, item):
        if item.owner is not None:
            self.counts["detached"] += 1
            item.owner = None

    @rule()
    def open(self):
        scope = NewDisposeScope(str(len(self.outer))).__enter__()
        self.outer[scope] = self.current
        self.scopes.append(scope)
        self.current = scope

    @precondition(lambda self: self.scopes)
    @rule(data=st.data())
    def close(self, data):
        scope = data.draw(st.sampled_from(self.scopes))
        scope.close()
        self.scopes.remove(scope)
        for item in self.items:
            if item.owner is scope:
                self.let_go(item)
        if self.current is scope:
            self.current = self.nearest_open(scope)

    @rule(value=st.integers(0, 100))
    def create(self, value):
        tensor = torch.full((2,), float(value))
        self.counts["created"] += self.current is not None
        self.items.append(Item(value, tensor, self.current))

    @rule(value=st.integers(0, 100))
    def create_persistent(self, value):
        with persist():
            self.items.append(Item(value, torch.full((2,), float(value)), None))

    @of_items
    def view(self, data):
        item = self.pick(data)
        if not item.disposed:
            self.counts["created"] += self.current is not None
            base = item.base or item
            self.items.append(Item(item.value, item.tensor[:1], self.current, base))

    @of_items
    def drop(self, data):
        item = self.pick(data)
        if any(other.base is item for other in self.items):
            return  # its views keep the very handle: torch hands it out as their _base
        self.items.remove(item)
        del item.tensor  # hypothesis keeps what it drew
        if item.owner is not None and not item.disposed:
            self.counts["released"] += 1

    @of_items
    def outwards(self, data):
        item = self.pick(data)
        move_to_outer(item.tensor)
        if self.current is not None and item.owner is self.current:
            outer = self.nearest_open(self.outer[self.current])
            if outer is None:
                self.set_free(item)
            item.owner = outer

    @of_items
    def detach(self, data):
        item = self.pick(data)
        detach_from_scope([item.tensor])
        self.set_free(item)

    @precondition(lambda self: self.items and self.current)
    @rule(data=st.data())
    def attach(self, data):
        item = self.pick(data)
        if not item.disposed:
            attach_to_scope(item.tensor)
            self.counts["attached"] += item.owner is None
            item.owner = self.current

    @precondition(lambda self: self.items and self.scopes)
    @rule(data=st.data())
    def move(self, data):
        item, scope = self.pick(data), data.draw(st.sampled_from(self.scopes))
        if not item.disposed:
            move_to(scope, {"x": item.tensor})
            self.counts["attached"] += item.owner is None
            item.owner = scope

    @of_items
    def dispose(self, data):
        item = self.pick(data)
        dispose(item.tensor)
        self.let_go(item)

    @precondition(lambda self: self.current)
    @rule(data=st.data())
    def dispose_everything_but(self, data):
        kept = data.draw(st.lists(st.sampled_from(self.items), max_size=2)) if self.items else []
        self.current.dispose_everything_but(*[item.tensor for item in kept])
        for item in self.items:
            if item.owner is self.current and item not in kept:
                self.let_go(item)

    @invariant()
    def every_tensor_is_where_the_model_says(self):
        assert current_scope() is self.current
        for item in self.items:
            assert owner_of(item.tensor) is item.owner
            assert is_disposed(item.tensor) == item.disposed
            if not item.disposed:
                assert item.tensor.tolist() == [item.value] * len(item.tensor)

    @invariant()
    def every_scope_owns_what_the_model_says(self):
        for scope in self.scopes:
            expected = {id(item.tensor) for item in self.items if item.owner is scope}
            assert {id(tensor) for tensor in scope.owned()} == expected

    @invariant()
    def the_counters_are_those_of_the_model(self):
        s, mine = statistics(), self.counts
        # what the checks above made in the current scope has come and gone
        extra = s.created_in_scope - mine["created"]
        assert s.released_in_scope - mine["released"] == extra
        assert (s.disposed_in_scope, s.attached_to_scope) == (mine["disposed"], mine["attached"])
        assert s.detached_from_scope == mine["detached"]
        assert s.disposed_outside_scope == mine["outside"]


TestOwnership = pytest.mark.slow(Ownership.TestCase)
TestOwnership.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
