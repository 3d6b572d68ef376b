"""The pytest side: the fixture `sim`, and the marker `simdevice` on every test that uses it.

Nothing is changed in torch until the first test with the fixture runs.
"""

from collections.abc import Iterator

import pytest

from ._setup import install
from ._simulator import Simulator


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what uses the device, before `-m` picks what runs."""
    for item in items:
        if "sim" in getattr(item, "fixturenames", ()):
            item.add_marker("simdevice")


@pytest.fixture
def sim() -> Iterator[Simulator]:
    """The simulated accelerator, started afresh; call it to choose a budget, a link, a failure.

    Raises:
        RaceError: at the end of the test, if a race was found that the test has not taken.
    """
    install()
    simulator = Simulator()
    yield simulator()
    simulator.fail_at(None)
    simulator.finish()
