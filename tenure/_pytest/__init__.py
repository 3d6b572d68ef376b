"""The pytest plugin: what tests hold of the memory of tensors.

Invariant: it does nothing to a test that asks for nothing, and imports torch with the first that
does. pytest loads it wherever tenure is installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tenure import DisposeScope

    from ._growth import TensorGrowth

_PEAK = "tenure_peak"
_MOST_SHOWN = 10
_LIMIT, _NO_LEAKS = "limit_tensor_memory", "no_tensor_leaks"
_MARKERS = (
    f"{_LIMIT}(size): the tensors of the test take at most so much at once, on each device, above "
    'what there was before it; bytes, or text as "24 MB".',
    f"{_NO_LEAKS}: no tensor that the test makes outlives its call.",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--tenure``."""
    parser.getgroup("tenure", "memory of tensors").addoption(
        "--tenure",
        action="store_true",
        help="measure what the tensors of each test take at most, and list the largest",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Say what the markers are."""
    for marker in _MARKERS:
        config.addinivalue_line("markers", marker)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Hold what the markers of a test say, once it has passed."""
    limit = item.get_closest_marker(_LIMIT)
    no_leaks = item.get_closest_marker(_NO_LEAKS)
    is_measured = limit is not None or bool(item.config.getoption("--tenure"))
    if not is_measured and no_leaks is None:
        return (yield)
    from . import _markers

    # Before the test runs: a mistake in a marker is told at once.
    most_bytes = None if limit is None else _markers.limit_of(limit)
    if no_leaks is not None:
        _markers.check_no_arguments(no_leaks)
    watched = _markers.WatchedBlock(
        is_measured=is_measured, finds_leaks=no_leaks is not None, name=item.name
    )
    try:
        with _markers.opened(watched, item):
            result = yield
    finally:
        # of one that fails by itself, too
        if (peak := watched.peak) is not None:
            item.user_properties.append((_PEAK, peak.facts()))
    watched.check(most_bytes)
    return result


@pytest.fixture
def tensor_scope(request: pytest.FixtureRequest) -> Iterator[DisposeScope]:
    """Open a scope around the test: it frees the tensors of the test at its end."""
    from tenure import NewDisposeScope

    with NewDisposeScope(request.node.name) as scope:
        yield scope


@pytest.fixture
def tensor_growth(request: pytest.FixtureRequest) -> Iterator[TensorGrowth]:
    """Return a call that iterates over items and fails if memory grows with each step.

    Example::

        def test_training_does_not_leak(tensor_growth):
            for batch in tensor_growth(batches):
                train(batch)
    """
    from ._growth import TensorGrowth

    n_failed = request.session.testsfailed
    growth = TensorGrowth()
    yield growth
    # a test that fails by itself has left its loop, too
    if request.session.testsfailed == n_failed:
        growth.check_ended()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """List the tests whose tensors took the most."""
    if not config.getoption("--tenure"):
        return
    # the reports of all workers are here: what was measured travels with them
    reports = [
        (dict(report.user_properties)[_PEAK], report.nodeid)
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, ())
        if report.when == "call" and _PEAK in dict(report.user_properties)
    ]
    largest = sorted(reports, key=lambda each: -each[0]["n_bytes"])[:_MOST_SHOWN]
    if not largest:
        return
    terminalreporter.write_sep("=", "most memory of tensors at once")
    for peak, name in largest:
        terminalreporter.write_line(f"{peak['text']:>10}  {name}")
        if peak["line"]:
            terminalreporter.write_line(f"{'':>10}  most of it made at {peak['line']}")
