"""The verbs as functions: what they do relative to the current scope, and what they refuse."""

import re
from functools import partial

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


def test_each_verb_gives_back_what_it_got():
    given, tree = torch.ones(1), {"x": torch.ones(2)}
    with NewDisposeScope() as scope:
        verbs = (move_to_outer, detach_from_scope, attach_to_scope, partial(move_to, scope))
        for verb in verbs:
            assert verb(given) is given
            assert verb(given, tree) == (given, tree)
        assert owner_of(given) is scope
        assert owner_of(move_to(None, given)) is owner_of("text") is None


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
