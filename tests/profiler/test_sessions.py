"""Profilers and timelines leave torch as it was, whatever is interrupted or fails meanwhile.

Private names are replaced, because no program makes a start, a turn, a mark or one part of the end
fail on its own.
"""

from collections import deque

import pytest
import torch
from torch.autograd import profiler as torch_profiler
from torch.autograd import profiler_legacy
from torch.optim import optimizer

from tenure._stream import _process
from tenure._torch import allocations
from tenure._torch import cpu_allocator as allocator
from tenure._torch.modes import all_modes
from tenure.profiler import LineProfiler, ProfilerUsageError, Timeline
from tenure.profiler._lines import _engine, _line_profiler
from tenure.profiler._timeline import _recorder, _timeline

from .lines.test_backward import N_LINES, found_by
from .lines.truth import profiled
from .test_together import NUMBER, facts
from .timeline.test_timeline import kib


def work():
    return torch.ones(10)


def fail(*_):
    raise MemoryError("no memory")


def state():
    table = allocator._table()
    return torch_profiler._prepare_profiler, table.flag.value, torch_profiler._enable_profiler


@pytest.mark.parametrize(
    "place",
    [(_process, "enter_host_blocks"), (_process, "announce"), (_line_profiler.LineEngine, "start")],
    ids=lambda place: place[1],
)
def test_a_profiler_or_a_timeline_that_can_not_begin_changes_nothing(place, monkeypatch):
    profiler, timeline, before = LineProfiler(work, device="cpu"), Timeline(), state()
    for block in (profiler, timeline) if place[0] is _process else (profiler,):
        with monkeypatch.context() as patched:
            patched.setattr(*place, fail)
            with pytest.raises(MemoryError, match="no memory"):
                block.__enter__()
        assert state() == before
    assert not profiler.enabled
    with profiler, Timeline() as timeline:
        work()
    assert profiler.records[0].hits == 1
    assert timeline.report.notes == ()
    assert state() == before


# --- how long they are, and the table of the allocator


def bytes_kept_after(n_calls):
    """Run a function that calls others and then profiles itself; return what its lines kept."""

    def nothing(_):
        pass

    def work():
        x = torch.ones(100)
        # one line, because the marks of more would have the stream read before
        deque(map(nothing, range(n_calls)))
        with profiler_legacy.profile():
            y = torch.ones(200)
            z = y * 2
        return x + z.sum()

    profiler = profiled(work, work)
    return sum(each.net_bytes for each in profiler.records)


def test_one_that_begins_after_any_number_of_calls_has_no_byte_counted_twice():
    # the stream is read after so many calls, also of what tells that a session has ended
    kept = {n_calls: bytes_kept_after(n_calls) for n_calls in range(0, _engine.TICKS_PER_TURN, 3)}
    assert set(kept.values()) == {400}, kept


def test_where_the_allocators_table_is_out_of_reach_peaks_are_lower_bounds(monkeypatch):
    nothing = allocator._NullTable()
    monkeypatch.setattr(allocator, "_table", lambda: nothing)

    def work():
        x = torch.ones(100)
        return x * 2

    profiler = profiled(work, work)
    assert facts(profiler) == [
        (1, 400, 0, 400, True, False),
        (1, 400 + NUMBER, 400 + NUMBER, 800 + NUMBER, True, False),
    ]


# --- marks


def test_a_hook_that_makes_and_frees_a_block_of_any_size_is_charged_for_it(monkeypatch):
    monkeypatch.setattr(allocations, "_report", lambda: None)  # else as in the tests of threads
    for n_bytes in (1007, 1013, 1016, 1024):
        program = [[(n_bytes, "at once")] * i for i in range(N_LINES)]
        expected, found = found_by(program, in_a_hook=True)
        assert found == expected


# --- timelines whose end is interrupted or fails, and the flag of c10 that they set


def test_an_error_of_the_block_is_not_masked_by_one_of_the_report(monkeypatch):
    monkeypatch.setattr(_recorder, "compose", fail)
    with pytest.raises(ValueError, match="of the block") as raised, Timeline() as timeline:
        raise ValueError("of the block")
    told = "has no report: MemoryError('no memory')"
    assert [note for note in raised.value.__notes__ if told in note]
    with pytest.raises(ProfilerUsageError, match=r"broken off by MemoryError\('no memory'\)"):
        timeline.report  # noqa: B018
    with pytest.raises(MemoryError, match="no memory"), Timeline():
        pass


def left_of_a_recording():
    return (
        allocations.is_profiling(),
        len(optimizer._global_optimizer_post_hooks),
        all_modes(),
        [*_timeline._open],
        [*_recorder.refusal_watchers],
        [*_recorder.scope_watchers],
        allocator._table().flag.value,
        vars(torch.UntypedStorage).get("resize_"),
    )


@pytest.mark.parametrize(
    ("hooked", "fails"),
    [("_census", False), ("compose", True), ("remove_dispatch", False), ("end", True)],
)
def test_ctrl_c_while_a_timeline_closes_goes_on_and_leaves_nothing_of_it(
    hooked, fails, monkeypatch
):
    with Timeline():
        kib(1)
    before = left_of_a_recording()
    home = allocations if hooked == "end" else _recorder
    was, calls = getattr(home, hooked), []

    def interrupt_once(*args):
        calls.append(args)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return was(*args)

    timeline = Timeline()

    def record():
        with timeline:
            kib(1)
            monkeypatch.setattr(home, hooked, interrupt_once)
            # it must not hide the interrupt
            if fails:
                raise ValueError("of the block")

    with pytest.raises(KeyboardInterrupt):
        record()
    assert left_of_a_recording() == before
    with pytest.raises(ProfilerUsageError, match=r"broken off by KeyboardInterrupt\(\)"):
        timeline.report  # noqa: B018
