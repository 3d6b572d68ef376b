"""A recording takes bounded memory, and loses no maximum and no byte of what was alive at one."""

import pytest
import torch

from tenure import NewDisposeScope
from tenure.profiler import Timeline

from .test_truth import check_sums


@pytest.mark.slow
@pytest.mark.parametrize("n_long", [0, 400], ids=["short lives", "lives of all lengths"])
def test_a_long_run_is_thinned_and_its_peak_is_exact(n_long):
    # more lives than are searched at once, and many times as many moments as are kept
    with Timeline() as timeline:
        kept = [torch.ones(10 + i) for i in range(n_long)]
        for i in range(25_000):
            if n_long:
                kept[i * 7 % n_long] = torch.ones(10 + i % 400)
            else:
                torch.ones(5 + i % 40)
            if i == 20_000:
                large = torch.ones(100_000)
                del large
        for _ in range(28_000):
            torch.ones(5)
    host = timeline.report.devices[0]
    assert 500 < len(host.times_s) <= 2048
    assert timeline.report.n_events > 100_000
    check_sums(timeline.report)
    row = host.at_peak[0]
    assert (row.n_bytes, row.n_storages) == (400_000, 1)
    # all that was alive at the peak is known by its line
    assert sum(row.n_bytes for row in host.at_peak if not row.n_storages) < 10_000
    assert max(host.by_category["other tensors"]) >= 400_000


def test_many_long_lives_leave_fewer_moments_and_the_peak(monkeypatch):
    # private names, because a million long lives take minutes
    series = "tenure.profiler._timeline._series"
    for name, value in (("_FIRST_LOOK", 200), ("_MOST_LIVES", 500), ("_FEWEST_MOMENTS", 8)):
        monkeypatch.setattr(f"{series}.{name}", value)
    with Timeline() as timeline:
        kept = [torch.ones(10 + i) for i in range(400)]
        for i in range(1000):
            kept[i % 400] = torch.ones(10 + (i * 7) % 400) * 2
        large = torch.ones(100_000)
        del large
        for _ in range(500):
            torch.ones(5)
    host = timeline.report.devices[0]
    assert len(host.times_s) <= 64
    check_sums(timeline.report)
    row = host.at_peak[0]
    assert (row.n_bytes, row.n_storages) == (400_000, 1)
    assert max(host.by_category["temporary or unexplained"]) < 10_000


def test_many_short_scopes_leave_the_longest():
    with Timeline() as timeline, NewDisposeScope("whole"):
        for _ in range(5000):
            with NewDisposeScope("short"):
                pass
    names = [span.name for span in timeline.report.scopes]
    assert names.count("whole") == 1
    assert 2000 < len(names) <= 4096
    assert f"{5001 - len(names)} short scopes are left out" in timeline.report.notes
