"""The pytest side: the fixture `sim`, and the marker `simdevice` on every test that uses it.

Nothing is changed in torch until the first test with the fixture runs. With `--sim-allocator=cuda`
the tests run as on CUDA's caching allocator, but for those that name one with the marker
`sim_allocator`: they would only run a second time, and are left out.
"""

from collections.abc import Iterator
from typing import Literal

import pytest

from tenure.testing import Simulator, simulated_accelerator

Allocator = Literal["exact", "cuda"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the command choose the allocator of the simulated accelerator."""
    parser.addoption(
        "--sim-allocator",
        choices=["exact", "cuda"],
        default="exact",
        help="the allocator of the simulated accelerator where a test names none",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what uses the device, before `-m` picks what runs."""
    for item in items:
        if "sim" in getattr(item, "fixturenames", ()):
            item.add_marker("simdevice")
    if _chosen(config) != "exact":
        again = [item for item in items if item.get_closest_marker("sim_allocator")]
        items[:] = [item for item in items if not item.get_closest_marker("sim_allocator")]
        config.hook.pytest_deselected(items=again)


def _chosen(config: pytest.Config) -> Allocator:
    return config.getoption("--sim-allocator", "exact")


def _allocator_of(item: pytest.Item) -> Allocator:
    marker = item.get_closest_marker("sim_allocator")
    return _chosen(item.config) if marker is None else marker.args[0]


@pytest.fixture
def sim(request: pytest.FixtureRequest) -> Iterator[Simulator]:
    """The simulated accelerator, started afresh; call it to choose a budget, a link, a failure.

    Raises:
        RaceError: at the end of the test, if a race was found that the test has not taken.
    """
    allocator = _allocator_of(request.node)
    with simulated_accelerator(allocator=allocator) as simulator:
        simulator.default_allocator = allocator
        yield simulator
