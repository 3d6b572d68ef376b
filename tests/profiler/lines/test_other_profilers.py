"""Beside profilers of the program: theirs are whole, and ours claims no more than it knows."""

import pytest
import torch
from torch.autograd import profiler_legacy
from torch.profiler import ProfilerActivity, profile, schedule

from tenure.profiler import LineProfiler

NUMBER = 8 + 4  # a Python number becomes a tensor, and that is converted


@pytest.fixture(scope="module", autouse=True)
def _started_once():
    """What is done once in a process allocates: finding c10's table, starting torch's profiler."""
    with theirs(), LineProfiler(n_bytes_seen, device="cpu"):
        torch.ones(1)


def theirs():
    return profile(profile_memory=True, activities=[ProfilerActivity.CPU])


def n_bytes_seen(profiled):
    """The allocations that torch.profiler saw."""
    events = profiled.profiler.kineto_results.events()
    return sum(e.nbytes() for e in events if e.name() == "[memory]" and e.nbytes() > 0)


def facts(profiler):
    return [
        (r.hits, r.allocated_bytes, r.freed_bytes, r.peak_bytes, r.exact, r.peak_exact)
        for r in profiler.records
    ]


def test_one_that_runs_before_keeps_its_events_and_ours_are_lower_bounds():
    def work():
        x = torch.ones(100)
        y = x * 2
        del x
        return y

    profiler = LineProfiler(work, device="cpu")
    with theirs() as profiled:
        torch.ones(10)
        with profiler:
            work()
        torch.ones(10)
    assert n_bytes_seen(profiled) == 40 + 400 + 400 + NUMBER + 40
    assert facts(profiler) == [
        (1, 400, 0, 400, False, False),
        (1, 400, 0, 800, False, False),
        (1, 0, 400, 800, False, False),
        (1, 0, 0, 400, False, False),
    ]
    first = work.__code__.co_firstlineno
    rows = str(profiler).splitlines()
    # below a title of several lines
    rows = rows[rows.index("line  hits     alloc     freed     net      peak  code") :]
    assert rows[2] == (
        f"{first + 1:4}     1  >= 400 B    >= 0 B   400 B  >= 400 B      x = torch.ones(100)"
    )


@pytest.mark.parametrize("kind", ["torch.profiler", "legacy"])
def test_one_that_runs_inside_keeps_its_events_and_ours_go_on_afterwards(kind):
    seen = []

    def work():
        x = torch.ones(100)
        with theirs() if kind == "torch.profiler" else profiler_legacy.profile() as profiled:
            y = torch.ones(200)
            z = y * 2
        seen.append(profiled)
        return x + z.sum()

    profiler = LineProfiler(work, device="cpu")
    with profiler:
        work()
    if kind == "torch.profiler":
        assert n_bytes_seen(seen[0]) == 800 + 800 + NUMBER
    assert {"aten::ones", "aten::mul"} <= {e.key for e in seen[0].key_averages()}
    by_line = facts(profiler)
    assert by_line[0] == (1, 400, 0, 400, True, True)
    assert by_line[2] == (1, 800, 0, 1200, False, False)
    assert by_line[3] == (1, 800, 0, 2000, False, False)
    assert by_line[-1][:2] == (1, 404)
    assert by_line[-1][4:] == (True, True)
    assert sum(line[1] - line[2] for line in by_line) == 400


def test_one_with_a_schedule_that_spans_several_calls_keeps_its_steps():
    def work():
        return torch.ones(100)

    traces = []
    profiler = LineProfiler(work, device="cpu")
    with (
        profiler,
        profile(
            activities=[ProfilerActivity.CPU],
            schedule=schedule(wait=1, warmup=1, active=2, repeat=1),
            on_trace_ready=lambda done: traces.append([e.key for e in done.key_averages()]),
        ) as profiled,
    ):
        for _ in range(5):
            work()
            profiled.step()
    assert len(traces) == 1
    assert "aten::ones" in traces[0]
    (record,) = profiler.records
    assert (record.hits, record.net_bytes) == (5, 5 * 400)
