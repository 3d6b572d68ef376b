"""The counters, and TorchSharp's own facts about them restated for reference-counted Python.

A fact is (created, disposed, attached, detached, disposed outside, live); where TorchSharp counts a
tensor as disposed because nothing frees it earlier, Python may have released it.
"""

import copy
import gc
import threading
import tracemalloc

import pytest
import torch

from tenure import NewDisposeScope, detach_from_scope, dispose, statistics


@pytest.fixture(autouse=True)
def fact():
    gc.collect()
    statistics().reset()
    before = statistics().live

    def fact():
        s = statistics()
        return (
            s.created_in_scope,
            s.disposed_in_scope,
            s.attached_to_scope,
            s.detached_from_scope,
            s.disposed_outside_scope,
            s.live - before,
        )

    return fact


@pytest.mark.parametrize(
    ("is_outside", "act", "inside", "after"),
    [
        (False, lambda scope, t: None, (1, 0, 0, 0, 0, 1), (1, 1, 0, 0, 0, 0)),
        (False, lambda scope, t: scope.detach(t), (1, 0, 0, 1, 0, 1), (1, 0, 0, 1, 0, 1)),
        (False, lambda scope, t: dispose(dispose(t)), (1, 1, 0, 0, 0, 0), (1, 1, 0, 0, 0, 0)),
        (True, lambda scope, t: scope.attach(t), (0, 0, 1, 0, 0, 1), (0, 1, 1, 0, 0, 0)),
        (True, lambda scope, t: detach_from_scope(t), (0, 0, 0, 0, 0, 0), (0, 0, 0, 0, 0, 0)),
        (True, lambda scope, t: dispose(dispose(t)), (0, 0, 0, 0, 1, 0), (0, 0, 0, 0, 1, 0)),
    ],
)
def test_of_a_tensor_that_is_made_in_a_scope_or_outside(fact, is_outside, act, inside, after):
    t = torch.ones(1) if is_outside else None
    with NewDisposeScope() as scope:
        t = torch.ones(1) if t is None else t
        act(scope, t)
        assert fact() == inside
    assert fact() == after
    del t


def test_a_tensor_that_is_detached_and_attached_again_is_live_once(fact):
    with NewDisposeScope() as first:
        t, other = first.detach(torch.ones(1)), first.move_to_outer(torch.ones(1))
    dispose(other)
    with NewDisposeScope() as second:
        second.attach(t)
        assert fact() == (2, 0, 1, 2, 1, 1)
    assert fact() == (2, 1, 1, 2, 1, 0)
    del t, other


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
    counts = []

    def work():
        with NewDisposeScope():
            torch.ones(1)
        counts.append(statistics().created_in_scope)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert counts == [1]
    assert statistics().created_in_scope == 0


def test_the_text_is_stable_and_an_unknown_counter_is_refused_by_name():
    assert str(statistics()).startswith(
        "created_in_scope: 0; disposed_in_scope: 0; released_in_scope: 0; attached_to_scope: 0; "
        "detached_from_scope: 0; disposed_outside_scope: 0; live: "
    )
    with pytest.raises(AttributeError, match="has no counter 'created'; it has"):
        _ = statistics().created
    assert copy.copy(statistics()).to_dict() == statistics().to_dict()


def test_the_census_of_handed_out_tensors_forgets_the_dead(fact):
    with NewDisposeScope():
        kept = [detach_from_scope(torch.ones(1)) for _ in range(1000)]
        assert fact()[-1] == 1000
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
    assert fact()[-1] == 0
