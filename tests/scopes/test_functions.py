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


def test_move_to_outer_is_relative_to_the_current_scope():
    with NewDisposeScope() as outer:
        with NewDisposeScope() as inner:
            made = move_to_outer(torch.ones(1))
            assert owner_of(made) is outer
            assert move_to_outer(made) is made  # a second call is for the current scope: no-op
            assert owner_of(made) is outer
        assert not inner.leaks


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


def test_a_tensor_passed_through_is_not_promoted_out_of_its_callers_scope():
    def identity(x):
        with NewDisposeScope():
            return move_to_outer(x)

    with NewDisposeScope():
        with NewDisposeScope() as caller:
            given = torch.ones(1)
            assert owner_of(identity(given)) is caller
        assert is_disposed(given)


def test_without_a_scope_the_verbs_hand_their_argument_back():
    x = torch.ones(1)
    assert move_to_outer(x) is x
    assert detach_from_scope(x) is x
    assert move_to(None, x) is x
    assert not is_disposed(x)


def test_detaching_finds_the_owner_however_far_out_it_is():
    with NewDisposeScope(), NewDisposeScope() as middle:
        made = torch.ones(1)
        with NewDisposeScope():
            assert owner_of(made) is middle
            detach_from_scope(made)
            assert owner_of(made) is None


def test_move_to_attaches_what_nobody_owns():
    given = torch.ones(1)
    with NewDisposeScope() as scope:
        statistics().reset()
        move_to(scope, given)
        assert owner_of(given) is scope
        assert statistics().attached_to_scope == 1


def test_move_to_detaches_when_the_target_is_none():
    with NewDisposeScope():
        made = move_to(None, torch.ones(1))
    assert not is_disposed(made)


def test_attaching_needs_a_scope():
    with pytest.raises(ScopeUsageError, match=r"no scope is open. Nothing was attached"):
        attach_to_scope(torch.ones(1))


def test_disposing_an_owned_tensor_takes_it_from_its_scope_and_twice_is_harmless():
    statistics().reset()
    with NewDisposeScope() as scope:
        made = torch.ones(1)
        dispose(made)
        dispose(made)
        assert is_disposed(made)
        assert len(scope) == 0
    assert statistics().disposed_in_scope == 1
    assert statistics().disposed_outside_scope == 0


def test_disposing_an_unowned_tensor_names_the_call():
    statistics().reset()
    made = torch.ones(2, dtype=torch.int64)
    dispose(made)
    dispose(made)
    assert statistics().disposed_outside_scope == 1
    with pytest.raises(
        DisposedTensorError,
        match=r"add\(\) got int64\[2\] on cpu, 16 B, disposed by dispose\(\) at \S+:\d+\. Keep",
    ):
        made + 1


def test_disposing_an_owned_tensor_names_the_call_and_the_owner():
    with NewDisposeScope("step"):
        made = torch.ones(2)
        dispose(made)
        with pytest.raises(
            DisposedTensorError,
            match=r"by dispose\(\) at \S+:\d+ while <DisposeScope 'step'> \(opened at \S+\) owned",
        ):
            made.sum()


def test_disposing_a_module_lets_its_parameters_and_buffers_go():
    model = torch.nn.BatchNorm1d(3)
    dispose(model)
    assert all(is_disposed(t) for t in (model.weight, model.bias, model.running_mean))


@pytest.mark.parametrize("name", VERBS)
@pytest.mark.parametrize("nothing", [5, None, "text", [], (), {}, object(), [[{"a": 1}]]])
def test_something_without_tensors_is_refused_by_name_and_the_rest_untouched(name, nothing):
    told = rf"^{re.escape(name)} got .*, which holds no tensor, and changed"
    with NewDisposeScope() as scope:
        made = torch.ones(1)
        with pytest.raises(ScopeUsageError, match=told):
            VERBS[name](made, nothing)
        assert owner_of(made) is scope
        assert not is_disposed(made)


@pytest.mark.parametrize("verb", VERBS.values())
def test_a_call_without_arguments_is_refused(verb):
    with pytest.raises(ScopeUsageError, match="without an argument"):
        verb()


def test_is_disposed_refuses_what_is_no_tensor():
    with pytest.raises(ScopeUsageError, match=r"is_disposed\(\) got a list"):
        is_disposed([torch.ones(1)])


def test_owner_of_something_else_is_none():
    assert owner_of(torch.ones(1)) is None
    assert owner_of("text") is None


class TestPackedSequences:
    """A packed sequence is a named tuple: its members go together, none stays behind."""

    @staticmethod
    def pack(lengths, *, enforce_sorted):
        rows = [torch.ones(length) for length in lengths]
        return torch.nn.utils.rnn.pack_sequence(rows, enforce_sorted=enforce_sorted)

    @staticmethod
    def members(packed):
        return [member for member in packed if member is not None]

    @pytest.mark.parametrize(("enforce_sorted", "n_members"), [(True, 2), (False, 4)])
    def test_all_members_are_owned_and_move_together(self, enforce_sorted, n_members):
        with NewDisposeScope() as outer:
            with NewDisposeScope() as inner:
                packed = move_to_outer(self.pack([3, 2], enforce_sorted=enforce_sorted))
                assert len(self.members(packed)) == n_members
                assert all(owner_of(member) is outer for member in self.members(packed))
                assert len(inner) == 0
            assert packed.data.sum() == 5
        assert all(map(is_disposed, self.members(packed)))

    def test_detaching_and_attaching_count_each_member_once(self):
        statistics().reset()
        with NewDisposeScope() as scope:
            packed = detach_from_scope(self.pack([2, 3], enforce_sorted=False))
            assert statistics().detached_from_scope == 4
            attach_to_scope(packed)
            assert statistics().attached_to_scope == 4
            assert all(member in scope for member in packed)
        assert all(map(is_disposed, packed))

    def test_disposing_twice_counts_each_member_once(self):
        statistics().reset()
        with NewDisposeScope():
            packed = self.pack([2, 3], enforce_sorted=False)
            dispose(packed)
            dispose(packed)
            assert statistics().disposed_in_scope == 4


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda scope, x: move_to(scope, x), "move_to()"),
        (lambda scope, x: attach_to_scope(x), "attach_to_scope()"),
        (lambda scope, x: scope.attach(x), "attach()"),
    ],
)
def test_taking_in_a_disposed_tensor_is_refused_in_the_name_of_the_verb(call, name):
    x = dispose(torch.ones(1))
    with NewDisposeScope() as scope, pytest.raises(DisposedTensorError) as caught:
        call(scope, x)
    assert str(caught.value).startswith(f"{name} got float32[1] on cpu")


def test_dispose_gives_back_what_it_got():
    x, tree = torch.ones(1), {"y": torch.ones(2)}
    assert dispose(x) is x
    assert dispose(tree) is tree
    assert dispose(x, tree) == (x, tree)
