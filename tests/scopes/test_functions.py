"""The verbs as functions: what they do relative to the current scope, and what they refuse."""

import re

import pytest
import torch

from tenure import (
    DisposedTensorError,
    NewDisposeScope,
    ScopeUsageError,
    attach_to_scope,
    detach_from_scope,
    dispose,
    is_disposed,
    move_to,
    move_to_outer,
    owner_of,
    statistics,
)

VERBS = {
    "move_to_outer()": move_to_outer,
    "detach_from_scope()": detach_from_scope,
    "attach_to_scope()": attach_to_scope,
    "dispose()": dispose,
    "move_to()": lambda *trees: move_to(None, *trees),
}


def test_each_verb_does_its_own_and_gives_back_what_it_got():
    given, other = torch.ones(1), torch.ones(2)
    for verb in (move_to_outer, detach_from_scope, lambda x: move_to(None, x)):
        assert verb(given) is given
    with NewDisposeScope() as outer:
        passed = torch.ones(1)
        with NewDisposeScope() as inner:
            # a second call is for the current scope, which does not own it any more
            assert [owner_of(move_to_outer(passed)) is outer for _ in range(2)] == [True] * 2
            made = move_to_outer(torch.ones(1))
            tree = {"x": given}
            assert attach_to_scope(tree) is tree
            assert owner_of(given) is inner
            assert move_to(outer, tree, other) == (tree, other)
            assert owner_of(given) is owner_of(made) is owner_of(other) is outer
            detached = detach_from_scope(move_to(None, torch.ones(1)), passed)[0]
            assert owner_of(detached) is owner_of(passed) is owner_of("text") is None
    assert [is_disposed(t) for t in (made, given, other)] == [True] * 3
    assert [is_disposed(t) for t in (detached, passed)] == [False] * 2


def test_a_tensor_at_the_address_of_a_dead_one_is_not_that_ones_scopes():
    with NewDisposeScope() as outer:
        dead = [torch.ones(1) for _ in range(100)]
        addresses = set(map(id, dead))
        del dead
        with NewDisposeScope() as inner:
            later = [inner.detach(torch.ones(1)) for _ in range(100)]
        assert addresses & set(map(id, later))
        assert {owner_of(tensor) for tensor in later} == {None}
        assert not any(tensor in outer for tensor in later)


def test_a_disposed_tensor_names_the_call_that_disposed_it_and_its_owner():
    statistics().reset()
    made = torch.ones(2, dtype=torch.int64)
    assert dispose(made) is dispose(made) is made
    assert statistics().disposed_outside_scope == 1
    told = r"add\(\) got int64\[2\] on cpu, 16 B, disposed by dispose\(\) at \S+:\d+"
    with pytest.raises(DisposedTensorError, match=rf"{told}\. Keep"):
        made + 1
    with NewDisposeScope("step") as scope:
        made = torch.ones(2, dtype=torch.int64)
        dispose(made)
        assert len(scope) == 0
        with pytest.raises(
            DisposedTensorError,
            match=rf"{told} while <DisposeScope 'step'> \(opened at \S+\) owned",
        ):
            made + 1
    assert statistics().disposed_in_scope == 1


@pytest.mark.parametrize("nothing", [None, object(), [[{"a": 1}]]])
def test_something_without_tensors_is_refused_by_name_and_the_rest_untouched(nothing):
    with NewDisposeScope() as scope:
        made = torch.ones(1)
        for name, verb in VERBS.items():
            told = rf"^{re.escape(name)} got .*, which holds no tensor, and changed"
            with pytest.raises(ScopeUsageError, match=told):
                verb(made, nothing)
            with pytest.raises(ScopeUsageError, match="without an argument"):
                verb()
            assert owner_of(made) is scope
            assert not is_disposed(made)


def test_attaching_without_a_scope_and_asking_of_no_tensor_are_refused():
    with pytest.raises(ScopeUsageError, match=r"no scope is open. Nothing was attached"):
        attach_to_scope(torch.ones(1))
    with pytest.raises(ScopeUsageError, match=r"is_disposed\(\) got a list"):
        is_disposed([torch.ones(1)])


def test_the_members_of_a_packed_sequence_go_together():
    statistics().reset()
    rows = [torch.ones(length) for length in (2, 3)]
    with NewDisposeScope() as outer:
        with NewDisposeScope() as inner:
            packed = torch.nn.utils.rnn.pack_sequence(rows, enforce_sorted=False)
            move_to_outer(packed)
            assert [owner_of(member) for member in packed] == [outer] * 4
            assert len(inner) == 0
        detach_from_scope(packed)
        attach_to_scope(packed)
        assert (statistics().detached_from_scope, statistics().attached_to_scope) == (4, 4)
    assert all(map(is_disposed, packed))
    assert statistics().disposed_in_scope == 4


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("move_to()", move_to),
        ("attach_to_scope()", lambda scope, *trees: attach_to_scope(*trees)),
        ("attach()", lambda scope, *trees: scope.attach(*trees)),
    ],
)
def test_taking_in_a_disposed_tensor_is_refused_in_the_name_of_the_verb(name, call):
    gone, given = dispose(torch.ones(1)), torch.ones(1)
    with NewDisposeScope() as scope, pytest.raises(DisposedTensorError) as caught:
        call(scope, given, gone)
    assert str(caught.value).startswith(f"{name} got float32[1] on cpu")
    assert not is_disposed(given)
