"""For every test: the simulated accelerator, a small heap."""

import gc
from collections.abc import Iterator

import pytest

from .captures import captures
from .compiling import forget_compiled
from .small_heap import hide, show
from .testing._pytest_plugin import pytest_addoption, pytest_collection_modifyitems, sim

__all__ = ["captures", "pytest_addoption", "pytest_collection_modifyitems", "sim"]


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


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """torch.compile begins as in a new process, and leaves nothing to the next test."""
    forget_compiled()
    yield
    forget_compiled()


@pytest.fixture(autouse=True, scope="module")
def _small_heap() -> None:
    gc.collect()  # only what is new since the file before
    hide()


@pytest.fixture
def whole_heap() -> Iterator[None]:
    """Nothing is hidden: where a module or a library that was there before has to be found."""
    show()
    yield
    hide()
