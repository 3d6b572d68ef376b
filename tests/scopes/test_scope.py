"""Opening, owning, handing on and closing: research table by table, edge by edge."""

import contextlib
import copy
import gc
import logging
import pickle
import sys
import threading
import weakref

import pytest
import torch

from tenure import (
    DisposedTensorError,
    DisposeScope,
    NewDisposeScope,
    ScopeUsageError,
    attach_to_scope,
    current_scope,
    is_disposed,
    move_to,
    owner_of,
    statistics,
)

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


def test_a_survivor_is_disposed_and_a_moved_tensor_lives():
    with NewDisposeScope() as scope:
        kept = torch.ones(3)
        moved = scope.move_to_outer(torch.full((3,), 2.0))
    assert is_disposed(kept)
    assert moved.tolist() == [2.0, 2.0, 2.0]


def test_a_scope_owns_only_what_is_made_inside():
    before = torch.ones(3)
    with NewDisposeScope() as scope:
        made = before + 1
        assert [t is made for t in scope.owned()] == [True]
        assert before not in scope
        assert made in scope
    assert not is_disposed(before)


def test_membership_is_by_identity_and_never_raises_for_other_objects():
    with NewDisposeScope() as scope:
        made = torch.ones(3)
        twin = made.clone()
        assert made in scope
        assert "text" not in scope
        assert None not in scope
        scope.detach(twin)
        assert twin not in scope


def test_a_tensor_that_died_is_not_owned_and_its_memory_is_free_at_once():
    with NewDisposeScope() as scope:
        made = torch.ones(1000)
        storage = weakref.ref(made.untyped_storage())
        del made
        assert len(scope) == 0
        assert storage() is None


def test_a_million_temporaries_leave_a_handful_of_entries():
    with NewDisposeScope() as scope:
        x = torch.ones(1)
        for _ in range(20_000):
            x + 1
        assert len(scope._ledger) < 100


def test_a_scope_that_owns_nothing_is_true():
    with NewDisposeScope() as scope:
        assert len(scope) == 0
        assert scope


def test_live_bytes_counts_a_storage_once():
    with NewDisposeScope() as scope:
        base = torch.ones(1024)
        assert scope.live_bytes == 4096
        view = base[:10]
        assert len(scope) == 2
        assert scope.live_bytes == 4096
        other = torch.ones(256, dtype=torch.float64)
        assert scope.live_bytes == 4096 + 2048
        del base, view, other
        assert scope.live_bytes == 0


class TestNesting:
    def test_the_inner_scope_is_current_and_knows_its_outer(self):
        assert current_scope() is None
        with NewDisposeScope("outer") as outer:
            with NewDisposeScope("inner") as inner:
                assert current_scope() is inner
                assert inner.outer is outer
                assert outer.outer is None
            assert current_scope() is outer
        assert current_scope() is None

    def test_a_move_without_an_outer_scope_detaches(self):
        statistics().reset()
        with NewDisposeScope() as scope:
            moved = scope.move_to_outer(torch.ones(2))
            assert owner_of(moved) is None
        assert statistics().detached_from_scope == 1
        assert moved.sum() == 2

    def test_eleven_scopes_put_one_mode_on_the_stack(self):
        with contextlib.ExitStack() as stack:
            for _ in range(11):
                stack.enter_context(NewDisposeScope())
            assert torch._C._len_torch_function_stack() == 1
        assert torch._C._len_torch_function_stack() == 0


class TestOutOfOrder:
    def test_closing_the_outer_first_leaves_the_inner_current(self):
        outer, inner = NewDisposeScope("outer"), NewDisposeScope("inner")
        outer.__enter__()
        first = torch.ones(1)
        inner.__enter__()
        outer.close()
        assert is_disposed(first)
        assert current_scope() is inner
        assert inner.outer is None
        second = torch.ones(1)
        assert owner_of(second) is inner
        inner.close()
        assert is_disposed(second)
        assert current_scope() is None
        assert torch._C._len_torch_function_stack() == 0

    def test_the_outer_of_a_scope_is_the_nearest_that_is_open(self):
        scopes = [NewDisposeScope(str(i)) for i in range(3)]
        for scope in scopes:
            scope.__enter__()
        scopes[1].close()
        assert scopes[2].outer is scopes[0]
        moved = scopes[2].move_to_outer(torch.ones(1))
        assert owner_of(moved) is scopes[0]
        scopes[2].close()
        assert current_scope() is scopes[0]
        scopes[0].close()

    def test_closing_early_makes_the_end_of_the_block_do_nothing(self):
        with NewDisposeScope() as scope:
            made = torch.ones(1)
            scope.close()
            scope.close()
            assert scope.closed
            assert is_disposed(made)
            later = torch.ones(1)
        assert not is_disposed(later)

    def test_other_modes_stay_on_the_stack_in_their_order(self):
        class Mode(torch.overrides.TorchFunctionMode):
            calls = 0

            def __torch_function__(self, func, types, args=(), kwargs=None):
                self.calls += 1
                return func(*args, **(kwargs or {}))

        scope, below, above = NewDisposeScope(), Mode(), Mode()
        with below:
            scope.__enter__()
            above.__enter__()
            scope.close()
            torch.ones(1)
            assert (below.calls, above.calls) == (1, 1)
            above.__exit__(None, None, None)
        assert torch._C._len_torch_function_stack() == 0

    def test_a_default_device_set_inside_stays_after_the_scope(self):
        with NewDisposeScope():
            torch.set_default_device("meta")
        try:
            assert torch.ones(1).device.type == "meta"
        finally:
            torch.set_default_device(None)


class TestAttachAndDetach:
    def test_attaching_an_unowned_tensor_counts_once(self):
        statistics().reset()
        given = torch.ones(2)
        with NewDisposeScope() as scope:
            assert scope.attach(given) is given
            scope.attach(given)
            assert given in scope
            assert statistics().attached_to_scope == 1
        assert is_disposed(given)

    def test_a_disposed_tensor_is_refused_and_nothing_else_is_attached(self):
        with NewDisposeScope():
            gone = torch.ones(2)
        given = torch.ones(2)
        with NewDisposeScope() as scope:
            with pytest.raises(DisposedTensorError, match=r"attach\(\) got float32\[2\] on cpu"):
                scope.attach(given, gone)
            assert owner_of(given) is None

    def test_detaching_what_is_not_owned_does_nothing(self):
        statistics().reset()
        with NewDisposeScope() as scope:
            scope.detach(torch.ones(1), given := torch.ones(1))
            scope.detach(given)
        assert statistics().detached_from_scope == 2

    def test_a_parameter_is_owned_only_when_attached(self):
        with NewDisposeScope() as scope:
            made = torch.nn.Parameter(torch.ones(2))
            attached = scope.attach(torch.nn.Parameter(torch.ones(2)))
        assert made.tolist() == [1, 1]
        assert is_disposed(attached)

    def test_move_to_another_scope_and_to_none(self):
        with NewDisposeScope() as far, NewDisposeScope(), NewDisposeScope() as near:
            a, b = near.move_to(far, torch.ones(1), torch.zeros(1))
            assert owner_of(a) is owner_of(b) is far
            c = near.move_to(None, torch.ones(1))
            assert owner_of(c) is None

    def test_one_argument_comes_back_as_it_is_and_several_as_a_tuple(self):
        with NewDisposeScope() as scope:
            tree = {"a": [torch.ones(1)]}
            assert scope.detach(tree) is tree
            first, second = torch.ones(1), [torch.ones(1)]
            back = scope.detach(first, second)
            assert back[0] is first
            assert back[1] is second


class TestDisposing:
    def test_everything_goes_and_the_scope_stays_open(self):
        with NewDisposeScope() as scope:
            first = torch.ones(1)
            scope.dispose_everything()
            assert is_disposed(first)
            second = torch.ones(1)
            assert second in scope

    def test_what_is_kept_stays_owned(self):
        with NewDisposeScope() as scope:
            first, second, third = torch.ones(1), torch.ones(1), torch.ones(1)
            assert scope.dispose_everything_but(first, [second]) == (first, [second])
            assert is_disposed(third)
            assert first in scope
        assert is_disposed(first)
        assert is_disposed(second)

    def test_a_foreign_tensor_that_is_kept_is_not_adopted(self):
        with NewDisposeScope() as outer:
            foreign = torch.ones(1)
            with NewDisposeScope() as inner:
                inner.dispose_everything_but(foreign)
            assert owner_of(foreign) is outer
            assert not is_disposed(foreign)

    def test_keeping_something_without_tensors_disposes_nothing(self):
        with NewDisposeScope() as scope:
            made = torch.ones(1)
            with pytest.raises(ScopeUsageError, match="holds no tensor, and changed nothing"):
                scope.dispose_everything_but(made, "not a tensor")
            assert not is_disposed(made)


class TestExceptions:
    def test_the_exception_goes_on_and_the_tensors_of_its_frames_are_gone(self):
        def fail():
            local = torch.ones(1000)
            storages.append(weakref.ref(local.untyped_storage()))
            raise ValueError("mine")

        storages = []
        with pytest.raises(ValueError, match="mine") as caught, NewDisposeScope():
            fail()
        assert caught.value.__traceback__ is not None
        assert storages[0]() is None

    def test_keep_leaves_the_survivors_of_a_failed_block_alive(self):
        kept = []
        with pytest.raises(ValueError, match="mine"), NewDisposeScope(on_error="keep"):
            fail_after(kept.append(torch.ones(2)))
        assert kept[0].tolist() == [1, 1]

    def test_keep_disposes_when_nothing_failed(self):
        with NewDisposeScope(on_error="keep"):
            made = torch.ones(2)
        assert is_disposed(made)

    def test_a_subclass_with_a_broken_flatten_stops_nobody(self, caplog):
        class Broken(torch.Tensor):
            __slots__ = ("inner",)

            def __tensor_flatten__(self):
                raise RuntimeError("broken")

        given = torch.Tensor._make_subclass(Broken, torch.ones(1))
        with NewDisposeScope() as scope:
            before, broken, after = torch.ones(1), given + 1, torch.ones(1)
            assert broken in scope
            assert scope.live_bytes == 12
        assert [is_disposed(t) for t in (before, broken, after)] == [True, False, True]
        assert "A Broken could not be disposed; it stays alive." in caplog.text
        assert broken.tolist() == [2]


class TestMisuse:
    def test_second_entry_names_the_scope_and_says_what_to_do(self):
        scope = NewDisposeScope("step")
        with scope, pytest.raises(ScopeUsageError, match=r"'step' open.*entered a second time"):
            scope.__enter__()
        with (
            pytest.raises(ScopeUsageError, match=r"make a new one with NewDisposeScope\(\)"),
            scope,
        ):
            pass
        assert torch._C._len_torch_function_stack() == 0

    @pytest.mark.parametrize("use", CHANGES)
    @pytest.mark.parametrize("state", ["not yet open", "closed"])
    def test_a_scope_that_is_not_open_is_refused(self, use, state):
        scope = NewDisposeScope("mine")
        if state == "closed":
            with scope:
                pass
        with pytest.raises(ScopeUsageError, match=f"'mine' {state}"):
            use(scope, torch.ones(1))

    def test_a_closed_scope_owns_nothing(self):
        with NewDisposeScope() as scope:
            made = torch.ones(1)
        assert (len(scope), scope.owned(), made in scope, scope.live_bytes) == (0, [], False, 0)

    def test_closing_a_scope_that_was_never_opened_is_refused(self):
        with pytest.raises(ScopeUsageError, match="not yet open"):
            NewDisposeScope().close()

    def test_moving_into_a_closed_scope_changes_nothing(self):
        with NewDisposeScope("target") as target:
            pass
        with NewDisposeScope() as scope:
            made = torch.ones(1)
            with pytest.raises(ScopeUsageError, match=r"'target' closed.*Nothing was moved"):
                scope.move_to(target, made)
            assert owner_of(made) is scope

    def test_moving_to_something_that_is_no_scope_is_refused(self):
        with NewDisposeScope() as scope, pytest.raises(ScopeUsageError, match="got Tensor"):
            scope.move_to(torch.ones(1), torch.ones(1))

    @pytest.mark.parametrize("option", ["policy", "on_error", "capture"])
    def test_unknown_options_are_refused_with_the_known_ones(self, option):
        with pytest.raises(ScopeUsageError, match=f"{option}='loud' is not one of"):
            NewDisposeScope(**{option: "loud"})

    @pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
    def test_a_scope_cannot_be_copied_or_pickled(self, duplicate):
        with NewDisposeScope() as scope, pytest.raises(ScopeUsageError, match="copied or pickled"):
            duplicate(scope)


class TestOtherThreads:
    @staticmethod
    def run(function):
        results = []

        def target():
            try:
                results.append(function())
            except BaseException as error:
                results.append(error)

        thread = threading.Thread(target=target, name="other")
        thread.start()
        thread.join()
        return results[0]

    @pytest.mark.parametrize(
        "use",
        [
            lambda scope, t: scope.close(),
            *CHANGES,
            lambda scope, t: scope.owned(),
            lambda scope, t: len(scope),
            lambda scope, t: t in scope,
            lambda scope, t: scope.live_bytes,
        ],
    )
    def test_every_method_is_refused_and_nothing_changes(self, use):
        with NewDisposeScope("mine") as scope:
            made = torch.ones(1)
            error = self.run(lambda: use(scope, made))
            assert isinstance(error, ScopeUsageError)
            assert "from thread 'other'" in str(error)
            assert "'mine' open, 1 tensor" in str(error)
            assert owner_of(made) is scope
        assert is_disposed(made)

    def test_a_scope_of_another_thread_is_refused_as_the_new_owner(self):
        with NewDisposeScope("theirs") as theirs:

            def hand_over():
                with NewDisposeScope() as mine:
                    made = torch.ones(1)
                    errors = []
                    for move in (mine.move_to, move_to):
                        with pytest.raises(ScopeUsageError) as caught:
                            move(theirs, made)
                        errors.append(str(caught.value))
                    return errors, owner_of(made) is mine

            errors, is_mine = self.run(hand_over)
            assert is_mine
            for error in errors:
                assert error.startswith("move_to() was called on <DisposeScope 'theirs' open, ")
                assert "from thread 'other'. Nothing was changed." in error
            assert theirs.owned() == []

    def test_another_thread_has_no_current_scope_and_tracks_nothing(self):
        with NewDisposeScope() as scope:
            made = self.run(lambda: (current_scope(), torch.ones(1)))
            assert made[0] is None
            assert made[1] not in scope

    def test_a_tensor_of_another_threads_scope_cannot_be_attached_or_disposed(self):
        from tenure import attach_to_scope, detach_from_scope, dispose

        with NewDisposeScope("mine") as scope:
            made = torch.ones(1)

            def steal():
                with NewDisposeScope():
                    attach_to_scope(made)

            assert "of another thread" in str(self.run(steal))
            assert "of another thread" in str(self.run(lambda: dispose(made)))
            assert "of another thread" in str(self.run(lambda: detach_from_scope(made)))
            assert owner_of(made) is scope

    def test_hand_over_by_detaching_here_and_attaching_there(self):
        with NewDisposeScope() as scope:
            made = scope.detach(torch.ones(1))

            def work():
                with NewDisposeScope() as theirs:
                    theirs.attach(made)
                    return made in theirs

            assert self.run(work) is True
        assert is_disposed(made)

    def test_a_copied_context_does_not_track_into_the_other_threads_scope(self):
        import contextvars

        with NewDisposeScope() as scope:
            context = contextvars.copy_context()

            def work():
                with NewDisposeScope("theirs"):
                    return context.run(lambda: (current_scope(), torch.ones(1)))

            current, made = self.run(work)
            assert current is None
            assert made not in scope

    def test_threads_may_begin_while_an_owner_is_looked_for_among_all_of_them(self):
        begun, is_over = [], threading.Event()

        def use_a_scope(has_begun):
            with NewDisposeScope():
                has_begun.set()
                is_over.wait(60)

        def at_each_line_of_weakref(frame, event, argument):
            if "weakref" not in frame.f_code.co_filename:
                return None
            has_begun = threading.Event()
            begun.append(threading.Thread(target=use_a_scope, args=(has_begun,)))
            begun[-1].start()
            has_begun.wait(60)
            return at_each_line_of_weakref

        tensor = torch.ones(2)
        before = sys.gettrace()
        with NewDisposeScope() as scope:
            sys.settrace(at_each_line_of_weakref)
            try:
                attach_to_scope(tensor)
            finally:
                sys.settrace(before)
                is_over.set()
            for thread in begun:
                thread.join()
            assert tensor in scope
        assert begun


class TestPolicies:
    def test_report_leaves_survivors_alive_and_unowned(self, caplog):
        history = []
        with (
            caplog.at_level(logging.WARNING, "tenure.scopes"),
            NewDisposeScope("step", policy="report") as scope,
        ):
            history.append(torch.ones(2, 3))
        assert history[0].sum() == 6
        assert owner_of(history[0]) is None
        assert len(scope.leaks) == 1
        (record,) = scope.leaks.records
        assert record.shape == (2, 3)
        assert record.created_at.startswith("tests/scopes/test_scope.py:")
        assert "history[0]" in record.holders[0]
        assert "history[0]" in caplog.text

    def test_raise_reports_and_raises_with_the_report(self):
        from tenure import ScopeLeakError

        history = []
        with (
            pytest.raises(ScopeLeakError, match=r"history\[0\]") as caught,
            NewDisposeScope(policy="raise"),
        ):
            history.append(torch.ones(2))
        assert len(caught.value.report) == 1
        assert history[0].tolist() == [1, 1]

    def test_raise_never_masks_the_exception_of_the_block(self):
        history = []
        with pytest.raises(ValueError, match="mine"), NewDisposeScope(policy="raise") as scope:
            fail_after(history.append(torch.ones(2)))
        assert len(scope.leaks) == 1

    def test_a_block_without_leaks_has_an_empty_report_and_no_scan(self, monkeypatch, caplog):
        monkeypatch.setattr(gc, "get_referrers", lambda *_: pytest.fail("the heap was scanned"))
        with NewDisposeScope(policy="report") as scope:
            torch.ones(1) + 1
        assert len(scope.leaks) == 0
        assert caplog.text == ""

    def test_a_local_of_a_running_function_is_no_leak(self):
        with NewDisposeScope(policy="raise") as scope:
            local = torch.ones(1)
        assert len(scope.leaks) == 0
        assert local.item() == 1

    def test_disposing_makes_no_report(self):
        with NewDisposeScope() as scope:
            torch.ones(1)
        assert scope.leaks is None


class TestCapture:
    def test_a_site_is_in_the_error_of_a_disposed_tensor(self):
        with NewDisposeScope(capture="site"):
            made = torch.ones(1)
        with pytest.raises(
            DisposedTensorError, match=r"created at tests/scopes/test_scope\.py:\d+\. Keep"
        ):
            made + 1

    def test_a_stack_names_the_callers_too(self):
        def make():
            return torch.nn.functional.relu(torch.ones(1))

        with NewDisposeScope(capture="stack"):
            made = make()
        with pytest.raises(DisposedTensorError, match=r"created at tests\S+:\d+ < tests\S+:\d+"):
            made + 1

    def test_without_capture_the_error_says_nothing_about_it(self):
        with NewDisposeScope():
            made = torch.ones(1)
        with pytest.raises(DisposedTensorError, match=r"closed\. Keep it"):
            made + 1


def test_repr_carries_the_state_everywhere():
    scope = NewDisposeScope("step")
    assert repr(scope) == "<DisposeScope 'step' not yet open>"
    with scope:
        made = torch.ones(1)
        assert repr(scope).startswith(
            "<DisposeScope 'step' open, 1 tensor, opened at tests/scopes/"
        )
        del made
    assert repr(scope).startswith("<DisposeScope 'step' closed, opened at tests/scopes/")
    assert repr(DisposeScope()) == "<DisposeScope not yet open>"


@pytest.mark.slow
def test_an_abandoned_scope_is_dropped_silently_at_interpreter_exit(tmp_path):
    import subprocess
    import sys

    script = tmp_path / "script.py"
    script.write_text(
        "import torch, tenure\n"
        "scope = tenure.NewDisposeScope().__enter__()\n"
        "kept = torch.ones(3)\n"
        "print(scope)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stderr == ""
    assert "open, 1 tensor" in done.stdout


def test_the_error_of_a_disposed_tensor_gives_the_advice_of_who_disposed_it():
    kept = []
    with NewDisposeScope() as scope:
        kept.append(torch.ones(2))
        scope.dispose_everything(advice="Ask the cook.")
    with pytest.raises(DisposedTensorError, match=r"kept\[0\] still holds it\. Ask the cook\.$"):
        kept[0].sum()
    with pytest.raises(AttributeError, match=r"Ask the cook\.$"):
        kept[0].unknown  # noqa: B018
