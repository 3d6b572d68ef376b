"""A timeline whose end is interrupted or fails, and the flag of c10 that it sets.

Private names are replaced, because no public way interrupts each part of the end.
"""

import pytest
import torch
from torch.optim import optimizer

from tenure._pytest._markers import WatchedBlock
from tenure._torch import allocations
from tenure._torch import cpu_allocator as _cpu_allocator
from tenure._torch.allocations import is_profiling
from tenure._torch.modes import all_modes
from tenure.profiler import LineProfiler, ProfilerUsageError, Timeline
from tenure.profiler._timeline import _recorder, _timeline

from .test_timeline import kib


def fail_with(error):
    def fail(*_):
        raise error

    return fail


def test_an_error_of_the_block_is_not_masked_by_one_of_the_report(monkeypatch):
    monkeypatch.setattr(_recorder, "compose", fail_with(MemoryError("of the report")))
    with pytest.raises(ValueError, match="of the block") as raised, Timeline() as timeline:
        raise ValueError("of the block")
    told = "has no report: MemoryError('of the report')"
    assert [note for note in raised.value.__notes__ if told in note]
    with pytest.raises(ProfilerUsageError, match=r"broken off by MemoryError\('of the report'\)"):
        timeline.report  # noqa: B018
    with pytest.raises(MemoryError, match="of the report"), Timeline():
        pass


def left_of_a_recording():
    return (
        is_profiling(),
        len(optimizer._global_optimizer_post_hooks),
        all_modes(),
        [*_timeline._open],
        [*_recorder.refusal_watchers],
        [*_recorder.scope_watchers],
        _cpu_allocator._table().flag.value,
        vars(torch.UntypedStorage).get("resize_"),
    )


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("hooked", ["_census", "compose", "remove_dispatch", "end", "tell_no_more"])
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


def test_a_flag_that_the_program_has_set_stays_set():
    flag = _cpu_allocator._table().flag
    assert not flag.value
    flag.value = True
    try:
        for block in (Timeline(), LineProfiler(kib, device="cpu")):
            with block:
                kib(1)
                assert flag.value
            assert flag.value
    finally:
        flag.value = False
    with Timeline():
        kib(1)
    assert not flag.value


def test_a_report_that_fails_does_not_mask_the_failure_of_the_test(monkeypatch):
    def fail(*_):
        raise MemoryError("of the report")

    monkeypatch.setattr(_recorder.TimelineRecorder, "close", fail)
    watched = WatchedBlock(is_measured=True, finds_leaks=False, name="test_it")
    with pytest.raises(ValueError, match="of the test"), watched:
        raise ValueError("of the test")
    watched.check(1)
    with (
        pytest.raises(MemoryError, match="of the report"),
        WatchedBlock(is_measured=True, finds_leaks=False, name="test_it"),
    ):
        pass
