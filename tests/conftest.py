"""For every test: the simulated accelerator, the lines of the checks on a GPU, the collector.

Half a million objects are imported, and each collection of garbage would look at all of them.
"""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from .cuda._lines import pytest_terminal_summary
from .testing._pytest_plugin import pytest_addoption, pytest_collection_modifyitems, sim

__all__ = [
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_terminal_summary",
    "sim",
]

_HERE = Path(__file__).parent
# They collect garbage again and again, and don't look for what holds a tensor.
_WITHOUT_HEAP = ("adaptive", "paging", "testing")
# but this file of theirs does, and a report has to search for what is frozen in another, slow way
_WITH_HEAP = ("test_named_memory.py",)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import the tests without looking for garbage among what is there to stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture
def nobody_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of disposed tensors name no holder: to look for one is most of what they take."""
    monkeypatch.setattr(
        "tenure.scopes._disposed.find_holders", lambda tensors: [[] for _ in tensors]
    )


@pytest.fixture(autouse=True, scope="module")
def _frozen(request: pytest.FixtureRequest) -> None:
    """Hide from the collector what was there before a file; from no test of the heap."""
    folder = request.path.relative_to(_HERE).parts[0]
    if folder in _WITHOUT_HEAP and request.path.name not in _WITH_HEAP:
        gc.collect()  # only what is new since the file before
        gc.freeze()
    else:
        gc.unfreeze()
