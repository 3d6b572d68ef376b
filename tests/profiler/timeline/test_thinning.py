"""A recording takes bounded memory, and loses no maximum and no byte of what was alive at one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tenure.profiler import Timeline
from tenure.profiler._timeline import _series
from tenure.profiler._timeline._series import FOREVER, Life, Series

from .test_truth import check_sums

MOST = 16


@given(st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 1000)), min_size=1, max_size=300))
def test_however_many_moments_there_are_the_highest_is_kept(steps):
    series, at_ns = Series(MOST), 0
    for moment, (later_ns, level) in enumerate(steps):
        at_ns += later_ns
        series.add(moment, at_ns, level)
        assert len(series.moments) <= MOST
    levels = [level for _, level in steps]
    highest = max(series.moments, key=lambda moment: moment.n_bytes)
    assert highest.n_bytes == max(levels)
    assert highest.number == levels.index(max(levels))
    assert series.moments == sorted(series.moments)
    assert all(levels[moment.number] == moment.n_bytes for moment in series.moments)


@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 100), st.integers(0, 10**6)), max_size=300
    )
)
def test_at_each_kept_moment_all_that_was_alive_is_there(born):
    """Each step something is made that lives for so many steps."""
    first_look, _series._FIRST_LOOK = _series._FIRST_LOOK, 10
    try:
        series, at_ns, ends, truth = Series(MOST), 0, {}, []
        for step, (lasts, n_bytes, later_ns) in enumerate(born):
            for entry in ends.pop(step, []):
                series.add_life(Life(*entry, 0, "", ""))
            ends.setdefault(step + lasts, []).append((step, step + lasts, n_bytes))
            at_ns += later_ns
            truth.append(
                sum(n for i, (lasts, n, _) in enumerate(born[: step + 1]) if i + lasts > step)
            )
            series.add(step, at_ns, truth[-1])
        for left in ends.values():
            for begin, _, n_bytes in left:
                series.add_life(Life(begin, FOREVER, n_bytes, 0, "", ""))
    finally:
        _series._FIRST_LOOK = first_look
    for moment, _, level in series.moments:
        alive = [life.n_bytes for life in series.lives if life.begin <= moment < life.end]
        assert sum(alive) == level == truth[moment]


def test_a_long_run_is_thinned_and_its_peak_is_exact(monkeypatch):
    monkeypatch.setattr(_series, "_FIRST_LOOK", 200)
    monkeypatch.setattr(_series, "_MOST_LIVES", 500)
    monkeypatch.setattr(_series, "_FEWEST_MOMENTS", 8)
    monkeypatch.setattr(_series.Series.__init__, "__defaults__", (64,))
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
    assert timeline.report.n_events > 4000
    check_sums(timeline.report)
    row = host.at_peak[0]
    assert (row.n_bytes, row.n_storages) == (400_000, 1)
    assert max(host.by_category["temporary or unexplained"]) < 10_000


@pytest.mark.parametrize("n", [1, 2, 3])
def test_many_short_scopes_leave_the_longest(monkeypatch, n):
    from tenure import NewDisposeScope
    from tenure.profiler._timeline import _recorder

    monkeypatch.setattr(_recorder, "_MOST_SPANS", 8)
    with Timeline() as timeline, NewDisposeScope("whole"):
        for _ in range(20 * n):
            with NewDisposeScope("short"):
                pass
    names = [span.name for span in timeline.report.scopes]
    assert names.count("whole") == 1
    assert len(names) <= 9
    assert any("short scopes are left out" in note for note in timeline.report.notes)
