"""Random programs under budgets, against a model that knows each size and who is alive."""

from contextlib import ExitStack

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tenure.adaptive import memory_budget

sizes = st.integers(0, 60)
places = st.integers(0, 3)
steps = st.one_of(
    st.tuples(st.just("make"), places, sizes),
    st.tuples(st.just("view"), places, places),
    st.tuples(st.just("grow"), places, sizes),
    st.tuples(st.just("add"), places, places),
    st.tuples(st.just("drop"), places, st.none()),
)


class Model:
    """Storages by number: their bytes, the part that was there before, and the names in them."""

    def __init__(self, limits):
        self.limits = limits
        self.n_bytes = {}
        self.before = {}
        self.names = {}
        self.lengths = {}

    def live_bytes(self):
        used = set(self.names.values())
        return sum(max(0, self.n_bytes[s] - self.before.get(s, 0)) for s in used)

    def put(self, name, n_bytes):
        """Whether a new storage fits beside all there is, and if so, that it is now `name`."""
        if n_bytes and self.live_bytes() + n_bytes > min(self.limits):
            return False
        storage = len(self.n_bytes)
        self.n_bytes[storage], self.names[name], self.lengths[name] = n_bytes, storage, n_bytes
        return True

    def grow(self, name, n_bytes):
        storage = self.names[name]
        counted = max(0, self.n_bytes[storage] - self.before.get(storage, 0))
        grown = max(0, max(n_bytes, self.n_bytes[storage]) - self.before.get(storage, 0)) - counted
        if grown and self.live_bytes() + grown > min(self.limits):
            return False
        self.n_bytes[storage] = max(n_bytes, self.n_bytes[storage])
        self.lengths[name] = n_bytes
        return True


def run(model, tensors, verb, name, argument):
    """One step of the model and of torch; both do it, or both refuse it and change nothing."""
    if verb == "make":
        return model.put(name, argument), lambda: tensors.update(
            {name: torch.zeros(argument, dtype=torch.uint8)}
        )
    if name not in tensors or (verb in {"view", "add"} and argument not in tensors):
        return True, lambda: None
    if verb == "view":
        model.names[name], model.lengths[name] = model.names[argument], model.lengths[argument]
        return True, lambda: tensors.update({name: tensors[argument].view(-1)})
    if verb == "grow":
        return model.grow(name, argument), lambda: tensors[name].resize_(argument)
    if verb == "add":
        return model.put(name, model.lengths[argument]), lambda: tensors.update(
            {name: tensors[argument] + 1}
        )
    del model.names[name]
    return True, lambda: tensors.pop(name)


@settings(max_examples=300, deadline=None)
@given(
    limits=st.lists(st.integers(20, 120), min_size=1, max_size=3),
    program=st.lists(steps, max_size=20),
)
def test_a_program_is_refused_where_the_model_says_and_counts_as_the_model_counts(limits, program):
    model, tensors, peak_bytes = Model(limits), {0: torch.zeros(30, dtype=torch.uint8)}, 0
    model.put(0, 0)
    model.n_bytes[0] = model.before[0] = model.lengths[0] = 30
    with ExitStack() as stack:
        budgets = [stack.enter_context(memory_budget(limit)) for limit in limits]
        for verb, name, argument in program:
            fits, act = run(model, tensors, verb, name, argument)
            if fits:
                act()
            else:
                with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
                    act()
            peak_bytes = max(peak_bytes, model.live_bytes())
            live = {budget.live_bytes for budget in budgets}
            assert live == {model.live_bytes()}
            assert {name: len(t) for name, t in tensors.items()} == {
                name: model.lengths[name] for name in model.names
            }
        tensors.clear()
        assert {budget.live_bytes for budget in budgets} == {0}
    assert all(budget.peak_bytes <= budget.limit_bytes for budget in budgets)
