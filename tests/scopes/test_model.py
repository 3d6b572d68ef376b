"""Random programs against a model of ownership that is too simple to be wrong; the counters."""

import copy
import gc
import tracemalloc

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
from tests.threads import on_thread


class Item:
    """A tensor, its value, and what the model says of it."""

    def __init__(self, value, tensor, owner, base=None):
        self.value, self.tensor, self.owner, self.base = value, tensor, owner, base
        self.disposed = self.is_free = False


def of_items(change):
    return precondition(lambda self: self.items)(rule(data=st.data())(change))


class Ownership(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        gc.collect()
        statistics().reset()
        self.live_before = statistics().live
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
            item.owner, item.is_free = None, True

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
        alive = [item for item in self.items if not item.disposed]
        known = sum(item.owner is not None or item.is_free for item in alive)
        assert s.live - self.live_before == known


TestOwnership = pytest.mark.slow(Ownership.TestCase)
TestOwnership.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


# --- the counters


@pytest.fixture(autouse=True)
def _from_zero():
    gc.collect()
    statistics().reset()


def test_temporaries_are_released_and_a_reset_inside_keeps_the_sums_right():
    data = torch.ones(4)
    with NewDisposeScope(), NewDisposeScope() as scope:
        result = data * data + data
        s = statistics()
        assert (s.created_in_scope, s.released_in_scope, len(scope)) == (2, 1, 1)
        s.reset()
        second = torch.ones(1)
        assert (s.created_in_scope, s.released_in_scope) == (1, 0)
        del result
        assert s.released_in_scope == 1
    assert s.disposed_in_scope == 1
    del second


def test_each_thread_counts_for_itself():
    def work():
        with NewDisposeScope():
            torch.ones(1)
        return statistics().created_in_scope

    assert on_thread(work) == 1
    assert statistics().created_in_scope == 0


def test_the_text_is_stable_and_an_unknown_counter_is_refused_by_name():
    assert str(statistics()).startswith(
        "created_in_scope: 0; disposed_in_scope: 0; released_in_scope: 0; attached_to_scope: 0; "
        "detached_from_scope: 0; disposed_outside_scope: 0; live: "
    )
    with pytest.raises(AttributeError, match="has no counter 'created'; it has"):
        _ = statistics().created
    assert copy.copy(statistics()).to_dict() == statistics().to_dict()


def test_the_census_of_handed_out_tensors_forgets_the_dead():
    before = statistics().live
    with NewDisposeScope():
        kept = [detach_from_scope(torch.ones(1)) for _ in range(1000)]
        assert statistics().live == before + 1000
        kept.clear()
        tracemalloc.start()
        try:
            for _ in range(2000):
                detach_from_scope(torch.ones(1))
            grown_bytes, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    # a reference to each would take 200 kB
    assert grown_bytes < 50_000
    assert statistics().live == before
