"""Whoever measures beside others sees the same bytes as alone."""

import pytest
import torch
from torch import nn

from tenure.adaptive import memory_budget
from tenure.profiler import LineProfiler, Timeline
from tests.true_peak import true_peak_bytes

from .lines.truth import sums_of, truth_of
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


def lines_of(profiler):
    return [
        (r.line, r.hits, r.allocated_bytes, r.freed_bytes, r.peak_bytes, r.exact, r.peak_exact)
        for r in profiler.records
    ]


def alone(work):
    with LineProfiler(step, nn.Linear.forward, device="cpu") as profiler:
        work()
    return lines_of(profiler)


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
    assert lines_of(profiler) == plain
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
        with LineProfiler(work, hook, device="cpu") as profiler:
            work()
        return lines_of(profiler)

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
            with LineProfiler(temporary, device="cpu") as profiler:
                temporary()
            assert all(record.exact for record in profiler.records)
        large = torch.ones(100_000)
        del large
    host = timeline.report.devices[0]
    assert max(host.by_category["temporary or unexplained"]) > 32_000
    assert host.peak_bytes - host.live_bytes[0] == 400_000
    assert timeline.report.notes == ()
