"""Whoever measures beside others sees the same bytes as alone."""

import pytest
import torch
from torch import nn
from torch.autograd import profiler_legacy
from torch.profiler import ProfilerActivity, profile, schedule

from tenure.adaptive import memory_budget
from tenure.profiler import LineProfiler, Timeline
from tests.true_peak import true_peak_bytes

from .lines.truth import profiled, sums_of, truth_of
from .timeline.test_timeline import check_sums


def step(model, optimizer, x):
    hidden = (model(x) * 2 + 1).exp()
    twice = hidden.sum() + (hidden * 3).sum()
    twice.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def work():
    torch.set_num_threads(1)
    model = nn.Linear(64, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.rand(32, 64)
    for _ in range(2):
        step(model, optimizer, x)
    return lambda: step(model, optimizer, x)


def facts(profiler):
    return [
        (r.hits, r.allocated_bytes, r.freed_bytes, r.peak_bytes, r.exact, r.peak_exact)
        for r in profiler.records
    ]


def alone(work):
    profiler = profiled(work, step, nn.Linear.forward)
    return facts(profiler)


@pytest.mark.parametrize("is_inside", [False, True])
def test_a_line_profiler_in_a_timeline_in_a_budget_are_all_exact(work, is_inside):
    plain, truth, peak = alone(work), truth_of(work), true_peak_bytes(work)
    profiler, timeline = LineProfiler(step, nn.Linear.forward, device="cpu"), Timeline()
    with memory_budget("1GiB") as budget:
        work()
        budgeted = budget.peak_bytes
    first, second = (profiler, timeline) if is_inside else (timeline, profiler)
    with memory_budget("1GiB") as budget, first, second:
        work()
    assert facts(profiler) == plain
    assert sums_of(profiler) == truth
    host = timeline.report.devices[0]
    assert host.peak_bytes - host.live_bytes[0] == peak
    assert timeline.report.notes == ()
    check_sums(timeline.report)
    assert budget.peak_bytes == budgeted


def test_a_hook_of_a_backward_pass_has_its_bytes_beside_a_timeline():
    def hook(gradient):
        doubled = gradient * 2
        return doubled + gradient

    def work():
        x = torch.ones(256, requires_grad=True)
        y = x * 3
        y.register_hook(hook)
        (y.sum() + y.exp().sum()).backward()

    def found():
        profiler = profiled(work, work, hook)
        return facts(profiler)

    work()
    plain = found()
    with Timeline() as timeline:
        beside = found()
    assert beside == plain
    assert timeline.report.notes == ()
    check_sums(timeline.report)


def test_a_profiler_that_ends_before_the_timeline_leaves_it_whole():
    def temporary():
        torch.linalg.svdvals(torch.ones(64, 64, dtype=torch.float64))

    with Timeline() as timeline:
        for _ in range(3):
            profiler = profiled(temporary, temporary)
            assert all(record.exact for record in profiler.records)
        large = torch.ones(100_000)
        del large
    host = timeline.report.devices[0]
    assert max(host.by_category["temporary or unexplained"]) > 32_000
    assert host.peak_bytes - host.live_bytes[0] == 400_000
    assert timeline.report.notes == ()


# --- beside profilers of the program: theirs are whole, and ours claims no more than it knows


NUMBER = 8 + 4  # a Python number becomes a tensor, and that is converted


@pytest.fixture(scope="module", autouse=True)
def _started_once():
    """What is done once in a process allocates: finding c10's table, starting torch's profiler."""
    with theirs(), LineProfiler(n_bytes_seen, device="cpu"):
        torch.ones(1)


def theirs():
    return profile(profile_memory=True, activities=[ProfilerActivity.CPU])


def n_bytes_seen(session):
    """The allocations that torch.profiler saw."""
    events = session.profiler.kineto_results.events()
    return sum(e.nbytes() for e in events if e.name() == "[memory]" and e.nbytes() > 0)


def test_one_that_runs_before_keeps_its_events_and_ours_are_lower_bounds():
    def work():
        x = torch.ones(100)
        y = x * 2
        del x
        return y

    profiler = LineProfiler(work, device="cpu")
    with theirs() as session:
        torch.ones(10)
        with profiler:
            work()
        torch.ones(10)
    assert n_bytes_seen(session) == 40 + 400 + 400 + NUMBER + 40
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
        with theirs() if kind == "torch.profiler" else profiler_legacy.profile() as session:
            y = torch.ones(200)
            z = y * 2
        seen.append(session)
        return x + z.sum()

    profiler = profiled(work, work)
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
        ) as session,
    ):
        for _ in range(5):
            work()
            session.step()
    assert len(traces) == 1
    assert "aten::ones" in traces[0]
    (record,) = profiler.records
    assert (record.hits, record.net_bytes) == (5, 5 * 400)
