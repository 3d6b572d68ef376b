"""The attempt routine: what a failed attempt leaves behind, and what is tried after it."""

import contextlib
import gc
import logging
import re
import sys
import weakref

import pytest
import torch

from tenure import NewDisposeScope, is_disposed, owner_of
from tenure._registries import shrinkables
from tenure.adaptive import OutOfRetriesError, add_listener, remove_listener, statistics
from tenure.adaptive._attempt import _attempts
from tenure.adaptive._attempt._attempts import Attempts

OOM = "CUDA out of memory. Tried to allocate 2.00 GiB."


class Halving:
    """The simplest search: down by halves to a floor."""

    limited_by = "minimum="

    def __init__(self, size, floor=1):
        self.size = size
        self.floor = floor
        self.n_succeeded = 0

    def succeeded(self):
        self.n_succeeded += 1

    def gave_up(self):
        return 0

    def shrink(self, info):
        if self.size // 2 < self.floor:
            return False
        self.size //= 2
        return True


def run(work, size=4, floor=1, **options):
    fallback = options.pop("fallback", None)
    name = options.pop("name", "work")
    with NewDisposeScope("test") as scope:
        return Attempts(name, scope, **options).run(Halving(size, floor), work, fallback)


class Recorder:
    """A state that notes what is asked of it."""

    def __init__(self):
        self.calls = []

    def begin(self):
        self.calls.append("begin")

    def finish(self):
        self.calls.append("finish")

    def undo(self):
        self.calls.append("undo")


@pytest.fixture
def no_gc():
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    ("largest", "error", "expected"),
    [
        (2, None, [True, False, True]),
        (0, OutOfRetriesError, [True, False, True]),
        (9, KeyError, [True]),
    ],
)
def test_the_collector_is_off_while_a_failure_is_handled(largest, error, expected):
    """Nobody would count the bytes that an automatic collection frees."""
    seen = []

    def work(size):
        seen.append(gc.isenabled())
        if size > largest:
            raise torch.OutOfMemoryError(OOM)
        if error is not None:
            raise error
        return size

    def on_retry(event):
        seen.append(gc.isenabled())

    with pytest.raises(error) if error else contextlib.nullcontext():
        assert run(work, on_retry=on_retry) == 2
    assert gc.isenabled()
    assert seen[:3] == expected


class Escapes:
    """The awkward ways in which a failed attempt outlives its frame."""

    def kept_in_a_local(self, error):
        kept = error  # noqa: F841  # a cycle: the frame holds the exception, that holds the frame
        raise error

    def chained(self, error):
        try:
            raise error
        except RuntimeError as cause:
            raise ValueError("could not make the batch") from cause

    def handled_before(self, error):
        try:
            raise error
        except RuntimeError:
            raise torch.OutOfMemoryError(OOM) from None

    def logged(self, error):
        try:
            raise error
        except RuntimeError:
            logging.getLogger("user").exception("ran out")
            raise

    def kept_by_sys(self, error):
        try:
            raise error
        except RuntimeError:
            sys.last_exc = sys.last_value = sys.exception()
            sys.last_traceback = sys.exception().__traceback__
            raise

    def in_an_outer_list(self, error):
        self.outer.append(error)
        raise error

    def grouped(self, error):
        errors = []
        for each in (error, ValueError("another")):
            try:
                raise each
            except Exception as caught:
                errors.append(caught)
        raise ExceptionGroup("tasks failed", errors)

    def __init__(self):
        self.outer = []


ESCAPES = [name for name in vars(Escapes) if not name.startswith("__")]


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("escape", ESCAPES)
def test_every_tensor_of_a_failed_attempt_is_dead_at_the_retry(escape, caplog):
    escapes, made, outer, dead_at_retry = Escapes(), [], [], []

    def work(size):
        if made:
            dead_at_retry.extend(ref() is None for ref in made)
            made.clear()
        activation = torch.ones(size, requires_grad=True) * 2
        factor = torch.ones(size)  # the graph saves it
        loss = (activation.exp() * factor).sum()
        outer.append(loss)
        made.append(weakref.ref(activation))
        made.extend(weakref.ref(each.untyped_storage()) for each in (activation, factor, loss))
        if size > 1:
            getattr(escapes, escape)(torch.OutOfMemoryError(OOM))
        return size

    assert run(work) == 1
    assert dead_at_retry == [True] * 8
    assert [is_disposed(loss) for loss in outer] == [True, True, False]
    assert caplog.records or escape != "logged"


@pytest.mark.usefixtures("no_gc")
def test_bytes_of_the_failed_attempt_are_gone_although_the_callee_kept_its_tensors(sim):
    kept, live = [], []

    def work(size):
        live.append(sim.allocated_bytes)
        kept.append(torch.ones(size * 5 << 18, device="sim"))
        return torch.ones(size * 5 << 18, device="sim").sum().item()

    sim.budget_bytes = 24 << 20
    assert run(work) == 2 * 5 << 18
    assert live == [0, 0]


def test_what_a_success_makes_belongs_to_the_scope_around():
    kept = []

    def work(size):
        kept.append(torch.ones(size))
        return torch.zeros(size)

    with NewDisposeScope("outer") as outer:
        result = run(work)
        assert owner_of(result) is owner_of(kept[0]) is outer
    assert is_disposed(result)
    result = run(work)
    assert owner_of(result) is None
    assert not is_disposed(result)


def test_an_exception_handled_around_the_call_keeps_its_traceback_and_its_frames():
    def fails(tensor):
        raise ValueError("of the caller")

    try:
        fails(torch.ones(3))
    except ValueError as outside:
        run(refuse_above(1))
        kept = outside
    assert kept.__traceback__.tb_next.tb_frame.f_locals["tensor"].shape == (3,)


def refuse_above(limit, text=OOM):
    def work(size):
        if size > limit:
            raise RuntimeError(text)
        return size

    return work


def test_giving_up_says_what_was_tried_and_comes_from_the_last_error():
    with pytest.raises(OutOfRetriesError) as caught:
        run(refuse_above(0, "sim:9 out of memory. Tried to allocate 3.1 GiB"))
    assert str(caught.value) == (
        "3 attempts of 'work' ran out of sim:9 memory (size 4, 2, 1; needed 3.1 GiB). Not even 1 "
        "fits: free memory, make the model or the sample smaller, or page the model."
    )
    assert caught.value.sizes == (4, 2, 1)
    assert caught.value.info.device == "sim:9"
    assert type(caught.value.__cause__) is RuntimeError


def test_giving_up_above_one_advises_a_smaller_minimum():
    with pytest.raises(
        OutOfRetriesError,
        match=r"^1 attempt of 'work' ran out of cuda memory \(chunk 4; needed 2.0 GiB\)\. "
        r"Allow less than 4 with minimum=",
    ):
        run(refuse_above(0), floor=3, unit="chunk")


def test_the_last_error_still_shows_its_lines_and_holds_no_tensor():
    made = []

    def work(size):
        activation = torch.ones(size)
        made.append(weakref.ref(activation))
        raise torch.OutOfMemoryError(OOM)

    with pytest.raises(OutOfRetriesError) as caught:
        run(work)
    names, tb = [], caught.value.__cause__.__traceback__
    while tb is not None:
        names.append(tb.tb_frame.f_code.co_name)
        tb = tb.tb_next
    assert names == ["_attempt", "work"]
    assert [ref() for ref in made] == [None, None, None]


def test_giving_up_can_be_nested_the_outer_work_shrinks_then():
    def outer(size):
        return run(refuse_above(0 if size > 2 else 1), size=1)

    assert run(outer, size=8) == 1


def test_another_error_goes_on_and_the_state_is_undone():
    state, kept = Recorder(), []

    def work(size):
        kept.append(torch.ones(2))
        raise ValueError("of the user")

    with pytest.raises(ValueError, match="of the user"):
        run(work, state=state)
    assert state.calls == ["begin", "undo"]
    assert not is_disposed(kept[0])


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_during_the_handling_of_an_oom_goes_on(error):
    def work(size):
        try:
            raise torch.OutOfMemoryError(OOM)
        except torch.OutOfMemoryError:
            raise error from None

    state = Recorder()
    with pytest.raises(error):
        run(work, state=state)
    assert state.calls == ["begin", "undo"]


@pytest.mark.parametrize("place", ["unused_bytes_at", "release"])
def test_an_interrupt_after_an_attempt_that_failed_finds_its_state_undone(place, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(_attempts, place, interrupted)
    state = Recorder()
    with pytest.raises(KeyboardInterrupt):
        run(refuse_above(2), state=state)
    assert state.calls == ["begin", "undo"]


def test_an_undoing_that_is_interrupted_is_done_again():
    class Interrupted(Recorder):
        def undo(self):
            super().undo()
            if self.calls.count("undo") == 1:
                raise KeyboardInterrupt

    state = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        run(refuse_above(2), state=state)
    assert state.calls == ["begin", "undo", "undo"]


def test_an_error_that_broke_more_than_the_attempt_is_not_retried():
    def work(size):
        sizes.append(size)
        raise torch.distributed.DistBackendError("NCCL error: Cuda failure 2 'out of memory'")

    sizes = []
    with pytest.raises(torch.distributed.DistBackendError):
        run(work)
    assert sizes == [4]


def test_the_state_is_noted_before_and_finished_or_undone_after_each_attempt():
    state = Recorder()
    assert run(refuse_above(2), state=state) == 2
    assert state.calls == ["begin", "undo", "begin", "finish"]


def test_a_state_that_runs_out_of_memory_in_finish_is_undone_and_tried_again():
    class Tight(Recorder):
        def finish(self):
            super().finish()
            if self.calls.count("finish") == 1:
                raise torch.OutOfMemoryError(OOM)

    state = Tight()
    assert run(refuse_above(4), state=state) == 2
    assert state.calls == ["begin", "finish", "undo", "begin", "finish"]


def test_a_state_that_runs_out_of_memory_in_begin_is_noted_again_and_not_undone():
    class Short(Recorder):
        def begin(self):
            super().begin()
            if len(self.calls) == 1:
                raise torch.OutOfMemoryError(OOM)

    state = Short()
    assert run(lambda size: size, state=state) == 2
    assert state.calls == ["begin", "begin", "finish"]


def test_a_state_that_fails_in_begin_is_not_undone():
    class Broken(Recorder):
        def begin(self):
            super().begin()
            raise KeyError("no such buffer")

    state = Broken()
    with pytest.raises(KeyError):
        run(lambda size: size, state=state)
    assert state.calls == ["begin"]


def test_the_fallback_runs_once_when_no_size_is_left():
    calls = []

    def fallback():
        calls.append("cpu")
        return "done"

    assert run(refuse_above(0), fallback=fallback) == "done"
    assert calls == ["cpu"]


def test_a_fallback_that_runs_out_too_ends_the_retries():
    def fallback():
        raise MemoryError

    with pytest.raises(OutOfRetriesError) as caught:
        run(refuse_above(0), fallback=fallback, size=1)
    assert isinstance(caught.value.__cause__, MemoryError)


class Pager:
    def __init__(self, *gives):
        self.gives = list(gives)
        self.asked = []

    def shrink(self, device, n_bytes):
        self.asked.append((device, n_bytes))
        return self.gives.pop(0) if self.gives else 0


def test_a_pager_is_asked_before_the_size_shrinks():
    pager = Pager(2 << 30)
    shrinkables.add(pager)
    assert run(refuse_above(2)) == 2
    assert pager.asked == [("cuda", 2 << 30), ("cuda", 2 << 30)]


def test_a_size_limit_asks_nobody_for_memory():
    pager = Pager(1 << 20)
    shrinkables.add(pager)
    assert run(refuse_above(2, "Invalid buffer size: 24.00 GiB")) == 2
    assert pager.asked == []


def test_a_pager_that_fails_is_logged_and_the_size_shrinks(caplog):
    class Broken:
        def shrink(self, device, n_bytes):
            raise ValueError("broken pager")

    broken = Broken()
    shrinkables.add(broken)
    assert run(refuse_above(2)) == 2
    assert "broken pager" in caplog.text


def test_each_new_size_is_logged_in_one_line_and_told_to_listeners(caplog):
    heard, mine = [], []
    add_listener(heard.append)
    try:
        run(refuse_above(1), on_retry=mine.append, unit="batch size")
    finally:
        remove_listener(heard.append)
    assert [record.getMessage() for record in caplog.records] == [
        "tenure: 'work' ran out of cuda memory at batch size 4 (needed 2.0 GiB more); "
        "goes on with 2.",
        "tenure: 'work' ran out of cuda memory at batch size 2 (needed 2.0 GiB more); "
        "goes on with 1.",
    ]
    assert [(event.kind, event.size, event.next_size) for event in heard] == [
        ("shrink", 4, 2),
        ("shrink", 2, 1),
    ]
    assert mine == heard


def test_statistics_count_on_this_thread():
    counts = statistics()
    counts.reset()
    run(refuse_above(1))
    assert str(counts) == (
        "3 attempts, 2 out of memory: 0 tried again, 2 made smaller, 0 moved to the CPU, 0 given "
        "up; 0 made larger"
    )
    assert statistics() is counts


def test_nothing_is_collected_or_emptied_without_an_error(monkeypatch):
    def forbidden(*_args):
        raise AssertionError("called on the way without an error")

    monkeypatch.setattr(gc, "collect", forbidden)
    monkeypatch.setattr("inspect.stack", forbidden)
    monkeypatch.setattr(torch.cuda, "empty_cache", forbidden)
    assert run(refuse_above(4)) == 4


# --- an error that is handled around the call


def refuse_with(error, tried):
    def work(size):
        tried.append(size)
        raise error

    return work


@pytest.mark.parametrize("suppressed", [False, True], ids=["as context", "suppressed"])
def test_an_oom_that_is_handled_around_the_call_makes_no_other_error_one(suppressed):
    tried = []
    try:
        raise torch.OutOfMemoryError(OOM)
    except torch.OutOfMemoryError as error:
        with pytest.raises(ValueError, match="a bug"):
            run(refuse_with(ValueError("a bug"), tried), 64)
        explicit = ValueError("a bug")
        explicit.__cause__, explicit.__suppress_context__ = error, suppressed
        with pytest.raises(ValueError, match="a bug"):
            run(refuse_with(explicit, tried), 64)
        with pytest.raises(torch.OutOfMemoryError):
            run(refuse_with(error, tried), 64)
    assert tried == [64, 64, 64]


def test_what_the_handled_error_came_of_is_none_of_the_attempts_either():
    tried = []
    try:
        try:
            raise torch.OutOfMemoryError(OOM)
        except torch.OutOfMemoryError as error:
            raise RuntimeError("could not make the batch") from error
    except RuntimeError:
        with pytest.raises(ValueError, match="a bug"):
            run(refuse_with(ValueError("a bug"), tried), 64)
    assert tried == [64]


def test_an_oom_of_the_attempt_counts_also_inside_a_handler_and_under_another_error():
    def work(size):
        if size > 16:
            try:
                raise torch.OutOfMemoryError(OOM)
            except torch.OutOfMemoryError:
                raise ValueError("could not make the batch")  # noqa: B904  # the context tells
        return size

    try:
        raise torch.OutOfMemoryError(OOM)
    except torch.OutOfMemoryError:
        assert run(work, 64) == 16


# --- memory in pieces


def on_sim(n_bytes):
    return torch.empty(n_bytes, dtype=torch.uint8, device="sim")


def test_giving_up_tells_how_the_memory_was_cut_up(sim):
    sim(allocator="cuda", budget="100MiB")
    kept = [on_sim(4 << 20) for _ in range(25)][::5]
    with pytest.raises(OutOfRetriesError) as caught:
        run(lambda size: on_sim(size * 20 << 20), size=2)
    assert str(caught.value) == (
        "2 attempts of 'work' ran out of sim:0 memory (size 2, 1; needed 20.0 MiB, free 0 B). At "
        "the last, 80.0 MiB were reserved and not allocated, in pieces: set "
        "PYTORCH_ALLOC_CONF=expandable_segments:True before the program starts. Not even 1 fits: "
        "free memory, make the model or the sample smaller, or page the model."
    )
    del kept


def test_giving_up_says_nothing_of_pieces_where_the_memory_was_in_use(sim):
    sim(allocator="cuda", budget="100MiB")
    kept = [on_sim(4 << 20) for _ in range(25)]
    with pytest.raises(OutOfRetriesError, match=r"free 0 B\)\. Not even 1 fits"):
        run(lambda size: on_sim(size * 20 << 20), size=2)
    del kept


@pytest.mark.parametrize("name", ["<lambda>", "lazy"])
def test_what_has_no_name_of_its_own_is_logged_with_the_line_that_called(caplog, name):
    run(refuse_above(2), name=name)
    (record,) = caplog.records
    assert re.match(rf"tenure: '{name}' at \S*test_attempts\.py:\d+ ran out", record.getMessage())
