"""Opening, owning, handing on and closing."""

import contextvars
import copy
import gc
import pickle
import re
import warnings
import weakref
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
import pytest
import torch

from tenure import (
    DisposedTensorError,
    NewDisposeScope,
    ScopeLeakError,
    ScopeUsageError,
    ScopeUsageWarning,
    attach_to_scope,
    current_scope,
    detach_from_scope,
    dispose,
    is_disposed,
    move_to,
    move_to_outer,
    owner_of,
    statistics,
)
from tenure.scopes import _disposal, _scope
from tenure.scopes._tracker import Tracker
from tests.threads import on_thread

CHANGES = [
    lambda scope, t: scope.move_to_outer(t),
    lambda scope, t: scope.move_to(None, t),
    lambda scope, t: scope.detach(t),
    lambda scope, t: scope.attach(t),
    lambda scope, t: scope.dispose_everything(),
    lambda scope, t: scope.dispose_everything_but(t),
]


def fail_after(_):
    raise ValueError("mine")


# --- what a scope owns


def test_a_scope_owns_what_is_made_inside_until_it_dies_moves_or_the_block_ends():
    before = torch.ones(3)
    with NewDisposeScope() as scope:
        kept = before + 1
        assert [t is kept for t in scope.owned()] == [True]
        moved = scope.move_to_outer(torch.full((3,), 2.0))
        # by identity, and whatever is asked for
        assert [x in scope for x in (kept, moved, before, "text", None)] == [True, *[False] * 4]
        made = torch.ones(1000)
        storage = weakref.ref(made.untyped_storage())
        del made
        assert storage() is None
        assert len(scope) == 1
        for _ in range(20_000):
            before + 1
        assert len(scope._ledger) < 100
    assert is_disposed(kept)
    assert (moved.tolist(), before.tolist()) == ([2.0] * 3, [1.0] * 3)
    assert (len(scope), scope.owned(), kept in scope, scope.live_bytes) == (0, [], False, 0)


# --- nesting, in turn and out of turn


def test_closing_early_makes_the_end_of_the_block_do_nothing():
    with NewDisposeScope() as scope:
        made = torch.ones(1)
        scope.close()
        scope.close()
        assert scope.closed
        assert is_disposed(made)
        later = torch.ones(1)
    assert not is_disposed(later)


def test_other_modes_stay_on_the_stack_in_their_order():
    class Mode(torch.overrides.TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    scope, below, above = NewDisposeScope(), Mode(), Mode()
    with below:
        scope.__enter__()
        above.__enter__()
        with NewDisposeScope():
            # one mode serves all scopes
            assert torch._C._len_torch_function_stack() == 3
        scope.close()
        torch.ones(1)
        assert (below.calls, above.calls) == (1, 1)
        above.__exit__(None, None, None)
    assert torch._C._len_torch_function_stack() == 0
    with NewDisposeScope():
        torch.set_default_device("meta")
    try:
        assert torch.ones(1).device.type == "meta"
    finally:
        torch.set_default_device(None)


# --- handing on


def test_everything_or_all_but_some_is_disposed_and_the_scope_stays_open():
    with NewDisposeScope() as outer:
        foreign = torch.ones(1)
        with NewDisposeScope() as scope:
            gone = torch.ones(1)
            scope.dispose_everything()
            first, second, third = torch.ones(1), torch.ones(1), torch.ones(1)
            assert is_disposed(gone)
            with pytest.raises(ScopeUsageError, match="holds no tensor, and changed nothing"):
                scope.dispose_everything_but(first, "not a tensor")
            assert not is_disposed(third)
            kept = first, [second], foreign
            assert scope.dispose_everything_but(*kept) == kept
            assert is_disposed(third)
            assert first in scope
        assert [is_disposed(t) for t in (first, second, foreign)] == [True, True, False]
        assert owner_of(foreign) is outer


# --- exceptions


def test_the_exception_goes_on_and_the_tensors_of_its_frames_are_gone():
    def fail():
        local = torch.ones(1000)
        storages.append(weakref.ref(local.untyped_storage()))
        raise ValueError("mine")

    storages = []
    with pytest.raises(ValueError, match="mine") as caught, NewDisposeScope():
        fail()
    assert caught.value.__traceback__ is not None
    assert storages[0]() is None


def test_keep_leaves_the_survivors_of_a_failed_block_alone_alive():
    kept = []
    with pytest.raises(ValueError, match="mine"), NewDisposeScope(on_error="keep"):
        fail_after(kept.append(torch.ones(2)))
    assert kept[0].tolist() == [1, 1]
    with NewDisposeScope(on_error="keep"):
        made = torch.ones(2)
    assert is_disposed(made)


# --- misuse


def test_second_entry_names_the_scope_and_says_what_to_do_and_no_copy_is_made():
    scope = NewDisposeScope("step")
    with scope, pytest.raises(ScopeUsageError, match=r"'step' open.*entered a second time"):
        scope.__enter__()
    for duplicate in (copy.copy, pickle.dumps):
        with pytest.raises(ScopeUsageError, match="copied or pickled"):
            duplicate(scope)
    with pytest.raises(ScopeUsageError, match=r"make a new one with NewDisposeScope\(\)"), scope:
        pass
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.parametrize("use", [*CHANGES, lambda scope, t: scope.move_to(scope, t)])
def test_a_scope_that_is_not_open_is_refused(use):
    scope = NewDisposeScope("mine")
    with pytest.raises(ScopeUsageError, match="'mine' not yet open"):
        use(scope, torch.ones(1))
    with pytest.raises(ScopeUsageError, match="not yet open"):
        scope.close()
    with scope:
        pass
    with pytest.raises(ScopeUsageError, match="'mine' closed"):
        use(scope, torch.ones(1))


def test_moving_into_what_is_closed_or_no_scope_changes_nothing():
    with NewDisposeScope("target") as target:
        pass
    with NewDisposeScope() as scope:
        made = torch.ones(1)
        with pytest.raises(ScopeUsageError, match=r"'target' closed.*Nothing was moved"):
            scope.move_to(target, made)
        with pytest.raises(ScopeUsageError, match="got Tensor"):
            scope.move_to(torch.ones(1), made)
        assert owner_of(made) is scope


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"policy": "loud"}, "policy='loud' is not one of"),
        ({"on_error": "loud"}, "on_error='loud' is not one of"),
        ({"capture": "loud"}, "capture='loud' is not one of"),
        # an array compares as an array
        ({"policy": np.ones(2)}, r"^policy=array\(.*\) is not one of 'dispose'"),
        ({"name": torch.ones(2)}, "got a Tensor as its name, and no scope was"),
    ],
)
def test_unknown_options_are_refused_with_the_known_ones(options, told):
    with pytest.raises(ScopeUsageError, match=told):
        NewDisposeScope(**options)


# --- other threads


@pytest.mark.parametrize(
    "use",
    [
        *CHANGES,
        lambda scope, t: scope.close(),
        lambda scope, t: scope.owned(),
        lambda scope, t: t in scope,
    ],
)
def test_every_method_is_refused_on_another_thread_and_nothing_changes(use):
    with NewDisposeScope("mine") as scope:
        made = torch.ones(1)
        with pytest.raises(ScopeUsageError, match=r"'mine' open, 1 tensor.*from thread 'other'"):
            on_thread(use, scope, made)
        assert owner_of(made) is scope
    assert is_disposed(made)


def test_a_scope_of_another_thread_is_refused_as_the_new_owner():
    def hand_over():
        with NewDisposeScope() as mine:
            made = torch.ones(1)
            for move in (mine.move_to, move_to):
                with pytest.raises(ScopeUsageError, match=told):
                    move(theirs, made)
                assert owner_of(made) is mine

    told = (
        r"^move_to\(\) was called on <DisposeScope 'theirs' open, .*'other'\. Nothing was changed"
    )
    with NewDisposeScope("theirs") as theirs:
        on_thread(hand_over)
        assert theirs.owned() == []


def test_tensors_of_another_threads_scope_are_refused_and_handed_over_by_detaching():
    def attach(tensor):
        with NewDisposeScope() as mine:
            attach_to_scope(tensor)
            return tensor in mine

    with NewDisposeScope("mine") as scope:
        made = torch.ones(1)
        for steal in (attach, dispose, detach_from_scope):
            with pytest.raises(ScopeUsageError, match="of another thread"):
                on_thread(steal, made)
        assert owner_of(made) is scope
        scope.detach(made)
        assert on_thread(attach, made) is True
    assert is_disposed(made)


def test_another_thread_tracks_nothing_also_in_a_copied_context():
    with NewDisposeScope() as scope:
        context = contextvars.copy_context()

        def work():
            with NewDisposeScope("theirs"):
                return context.run(lambda: (current_scope(), torch.ones(1)))

        for run in (work, lambda: (current_scope(), torch.ones(1))):
            current, made = on_thread(run)
            assert current is None
            assert made not in scope


# --- policies


def test_raise_raises_with_the_report_and_never_masks_the_exception_of_the_block():
    history = []
    with (
        pytest.raises(ScopeLeakError, match=r"history\[0\]") as caught,
        NewDisposeScope(policy="raise"),
    ):
        history.append(torch.ones(2))
    assert len(caught.value.report) == 1
    with pytest.raises(ValueError, match="mine"), NewDisposeScope(policy="raise") as scope:
        fail_after(history.append(torch.ones(2)))
    assert len(scope.leaks) == 1
    assert [t.tolist() for t in history] == [[1, 1], [1, 1]]


def test_a_block_without_leaks_has_an_empty_report_and_no_scan(monkeypatch, caplog):
    with NewDisposeScope(policy="raise") as scope:
        local = torch.ones(1)
    assert (len(scope.leaks), local.item()) == (0, 1)
    monkeypatch.setattr(gc, "get_referrers", lambda *_: pytest.fail("the heap was scanned"))
    with NewDisposeScope(policy="report") as scope, NewDisposeScope() as plain:
        torch.ones(1) + 1
    assert len(scope.leaks) == 0
    assert plain.leaks is None
    assert caplog.text == ""


# --- what is told


def test_an_error_says_by_which_calls_a_tensor_was_made_if_asked_to():
    def make():
        return torch.nn.functional.relu(torch.ones(1))

    with NewDisposeScope(capture="stack"):
        made = make()
    with pytest.raises(DisposedTensorError, match=r"created at tests\S+:\d+ < tests\S+:\d+"):
        made + 1


def test_repr_says_where_a_scope_was_opened_and_its_name_if_it_has_one():
    scope, begin = NewDisposeScope("step"), r"^<DisposeScope 'step' "
    with scope:
        made = torch.ones(1)
        assert re.match(begin + r"open, 1 tensor, opened at tests/scopes/\S+:\d+>$", repr(scope))
        del made
    assert re.match(begin + r"closed, opened at tests/scopes/\S+:\d+>$", repr(scope))
    assert repr(NewDisposeScope()) == "<DisposeScope not yet open>"


def test_the_error_of_a_disposed_tensor_gives_the_advice_of_who_disposed_it():
    kept = []
    with NewDisposeScope() as scope:
        kept.append(torch.ones(2))
        scope.dispose_everything(advice="Ask the cook.")
    with pytest.raises(DisposedTensorError, match=r"kept\[0\] still holds it\. Ask the cook\.$"):
        kept[0].sum()
    with pytest.raises(AttributeError, match=r"Ask the cook\.$"):
        kept[0].unknown  # noqa: B018


# --- the verbs as functions


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


@pytest.mark.parametrize("nothing", [None, [], {"boxes": [], "masks": (None, {})}])
def test_a_result_in_which_nothing_was_found_is_returned(nothing):
    with NewDisposeScope() as scope:
        assert all(verb(nothing) is nothing for verb in VERBS.values())
        assert scope.move_to_outer(nothing) is nothing


@pytest.mark.parametrize("nothing", [0, object(), [[{"a": 1}]]])
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


# --- blocks that are interrupted as they open or close leave nothing of themselves on the thread


@pytest.fixture(autouse=True)
def nothing_stays_on_the_thread():
    yield
    assert current_scope() is None
    assert torch._C._len_torch_function_stack() == 0


def interrupt(*_):
    raise KeyboardInterrupt


def test_a_warning_that_is_an_error_or_an_interrupt_leaves_no_scope_open(monkeypatch):
    def items():
        with NewDisposeScope("items"):
            yield 1

    generator = items()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ScopeUsageWarning, match=r"inside the generator .*items\(\)"):
            next(generator)
    monkeypatch.setattr(Tracker, "enter_world", interrupt)
    with pytest.raises(KeyboardInterrupt):
        NewDisposeScope("never").__enter__()


def test_an_interrupt_while_closing_leaves_no_scope_open(monkeypatch):
    with NewDisposeScope("outer") as outer:
        inner = NewDisposeScope("inner").__enter__()
        monkeypatch.setattr(_scope, "take_all", interrupt)
        torch.ones(1)
        with pytest.raises(KeyboardInterrupt):
            inner.close()
        monkeypatch.undo()
        assert inner.closed
        assert current_scope() is outer


def close_in_a_backward_hook(scope):
    leaf = torch.ones(2, requires_grad=True)
    leaf.register_post_accumulate_grad_hook(lambda _: scope.close())
    product = (leaf * leaf).sum()
    product.backward()
    return product


def test_a_scope_that_a_backward_hook_has_closed_is_cleared_by_its_end_or_the_next():
    with NewDisposeScope("step") as scope:
        product = close_in_a_backward_hook(scope)
        assert scope.closed
    assert is_disposed(product)
    for _ in range(3):
        product = close_in_a_backward_hook(NewDisposeScope("step").__enter__())
        assert torch._C._len_torch_function_stack() == 1
    with NewDisposeScope("next"):
        assert is_disposed(product)
        made = torch.ones(2)
    assert is_disposed(made)


def test_a_scope_whose_block_runs_stays_whoever_opens_another():
    class Mine:
        def __enter__(self):
            self.scope = NewDisposeScope("mine").__enter__()

        def __exit__(self, *error):
            self.scope.__exit__(*error)

    @contextmanager
    def managed():
        with NewDisposeScope("managed"):
            yield

    by_hand = NewDisposeScope("by hand").__enter__()
    with Mine(), managed(), ExitStack() as stack:
        stack.enter_context(NewDisposeScope("stacked"))
        with NewDisposeScope("innermost") as scope:
            names = []
            while (scope := scope.outer) is not None:
                names.append(scope.name)
    by_hand.close()
    assert names == ["stacked", "managed", "mine", "by hand"]


def test_an_exception_while_one_tensor_is_disposed_stops_no_other(monkeypatch):
    dispose_tensor = _disposal.dispose_tensor
    unlucky = []

    def dispose_or_interrupt(tensor, *args):
        if not unlucky:
            unlucky.append(tensor)
            raise KeyboardInterrupt
        return dispose_tensor(tensor, *args)

    made = []
    monkeypatch.setattr(_disposal, "dispose_tensor", dispose_or_interrupt)
    with pytest.raises(KeyboardInterrupt), NewDisposeScope():
        made += [torch.ones(1) for _ in range(4)]
    assert [is_disposed(tensor) for tensor in made if tensor is not unlucky[0]] == [True] * 3
