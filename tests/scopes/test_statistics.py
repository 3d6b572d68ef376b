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

from tenure import NewDisposeScope, attach_to_scope, detach_from_scope, dispose, statistics


@pytest.fixture(autouse=True)
def fresh():
    statistics().reset()


def fact():
    s = statistics()
    return (
        s.created_in_scope,
        s.disposed_in_scope,
        s.attached_to_scope,
        s.detached_from_scope,
        s.disposed_outside_scope,
        s.live - LIVE_BEFORE[0],
    )


LIVE_BEFORE = [0]


@pytest.fixture(autouse=True)
def baseline():
    gc.collect()
    LIVE_BEFORE[0] = statistics().live


@pytest.mark.parametrize(
    ("act", "inside", "after"),
    [
        (lambda scope, t: None, (1, 0, 0, 0, 0, 1), (1, 1, 0, 0, 0, 0)),
        (lambda scope, t: scope.attach(t), (1, 0, 0, 0, 0, 1), (1, 1, 0, 0, 0, 0)),
        (lambda scope, t: scope.detach(t), (1, 0, 0, 1, 0, 1), (1, 0, 0, 1, 0, 1)),
        (lambda scope, t: dispose(t), (1, 1, 0, 0, 0, 0), (1, 1, 0, 0, 0, 0)),
        (lambda scope, t: dispose(dispose(t)), (1, 1, 0, 0, 0, 0), (1, 1, 0, 0, 0, 0)),
    ],
    ids=["as it is", "attached", "detached", "disposed", "disposed twice"],
)
def test_of_a_tensor_that_is_made_in_a_scope(act, inside, after):
    with NewDisposeScope() as scope:
        t = torch.ones(1)
        act(scope, t)
        assert fact() == inside
    assert fact() == after
    del t


@pytest.mark.parametrize(
    ("act", "inside", "after"),
    [
        (lambda scope, t: None, (0, 0, 0, 0, 0, 0), (0, 0, 0, 0, 0, 0)),
        (lambda scope, t: scope.attach(t), (0, 0, 1, 0, 0, 1), (0, 1, 1, 0, 0, 0)),
        (lambda scope, t: dispose(scope.attach(t)), (0, 1, 1, 0, 0, 0), (0, 1, 1, 0, 0, 0)),
        (lambda scope, t: scope.detach(scope.attach(t)), (0, 0, 1, 1, 0, 1), (0, 0, 1, 1, 0, 1)),
        (lambda scope, t: detach_from_scope(t), (0, 0, 0, 0, 0, 0), (0, 0, 0, 0, 0, 0)),
        (lambda scope, t: dispose(dispose(t)), (0, 0, 0, 0, 1, 0), (0, 0, 0, 0, 1, 0)),
    ],
    ids=[
        "as it is",
        "attached",
        "disposed",
        "detached",
        "never its own",
        "disposed twice",
    ],
)
def test_of_a_tensor_that_is_made_outside(act, inside, after):
    t = torch.ones(1)
    with NewDisposeScope() as scope:
        act(scope, t)
        assert fact() == inside
    assert fact() == after


def test_attaching_to_a_second_scope_counts_once():
    t = torch.ones(1)
    with NewDisposeScope() as first:
        first.attach(t)
        with NewDisposeScope():
            attach_to_scope(t)
            assert fact() == (0, 0, 1, 0, 0, 1)


def test_a_tensor_that_was_detached_is_disposed_outside():
    with NewDisposeScope() as scope:
        t = scope.detach(torch.ones(1))
    dispose(t)
    assert fact() == (1, 0, 0, 1, 1, 0)


def test_a_parameter_made_of_a_scoped_tensor_keeps_its_value():
    with NewDisposeScope():
        t = torch.full((1,), 3.0)
        parameter = torch.nn.Parameter(t)
        dispose(t)
        assert fact() == (1, 1, 0, 0, 0, 0)
    assert parameter.item() == 3.0


def test_a_tensor_that_is_detached_and_attached_again_is_live_once():
    with NewDisposeScope() as first:
        t = first.detach(torch.ones(1))
    with NewDisposeScope() as second:
        second.attach(t)
        assert fact() == (1, 0, 1, 1, 0, 1)
    assert fact() == (1, 1, 1, 1, 0, 0)
    del t


def test_minimal_dispose_works():
    with NewDisposeScope() as scope:
        a1, a2, a3, a4 = (torch.ones(1) for _ in range(4))
        scope.detach(a2)
        scope.move_to_outer(a3)
        dispose(a4)
        assert {id(t) for t in scope.owned()} == {id(a1)}
    assert fact() == (4, 2, 0, 2, 0, 2)


def test_temporaries_are_released_and_not_disposed():
    data = torch.ones(4)
    with NewDisposeScope() as scope:
        result = data * data + data
        assert len(scope) == 1
    assert statistics().created_in_scope == 2
    assert statistics().released_in_scope == 1
    assert statistics().disposed_in_scope == 1
    del result


def test_counters_add_up_while_scopes_are_open():
    with NewDisposeScope(), NewDisposeScope() as inner:
        kept = [torch.ones(1) for _ in range(5)]
        inner.move_to_outer(kept[0])
        kept.pop()
        s = statistics()
        assert (s.created_in_scope, s.released_in_scope, s.live - LIVE_BEFORE[0]) == (5, 1, 4)


def test_resetting_inside_a_scope_keeps_the_sums_right():
    with NewDisposeScope():
        first = torch.ones(1)
        statistics().reset()
        second = torch.ones(1)
        assert statistics().created_in_scope == 1
        assert statistics().released_in_scope == 0
        del first
        assert statistics().released_in_scope == 1
    assert statistics().disposed_in_scope == 1
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


def test_the_text_is_stable():
    assert str(statistics()).startswith(
        "created_in_scope: 0; disposed_in_scope: 0; released_in_scope: 0; attached_to_scope: 0; "
        "detached_from_scope: 0; disposed_outside_scope: 0; live: "
    )
    assert repr(statistics()).startswith("<ScopeStatistics created_in_scope: 0;")


def test_an_unknown_counter_is_refused_by_name_and_counters_can_be_copied():
    with pytest.raises(AttributeError, match="has no counter 'created'; it has"):
        _ = statistics().created
    assert copy.copy(statistics()).to_dict() == statistics().to_dict()


def test_the_census_of_handed_out_tensors_forgets_the_dead():
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
