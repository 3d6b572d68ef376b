"""For every test: the simulated accelerator, a small heap."""

import gc
from collections.abc import Iterator

import pytest

from .captures import captures
from .compiling import forget_compiled
from .small_heap import hide, show
from .testing import _pytest_plugin
from .testing._pytest_plugin import pytest_collection_modifyitems, sim

__all__ = [
    "captures",
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "sim",
]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the command choose the simulated allocator, and how much is in the heap."""
    _pytest_plugin.pytest_addoption(parser)
    parser.addoption(
        "--whole-heap",
        action="store_true",
        help="let tests find in the heap what was there before them, as in a program",
    )


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
def _small_heap(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--whole-heap"):
        gc.collect()  # only what is new since the file before
        hide()


@pytest.fixture
def whole_heap(request: pytest.FixtureRequest) -> Iterator[None]:
    """Nothing is hidden: where a module or a library that was there before has to be found."""
    show()
    yield
    if not request.config.getoption("--whole-heap"):
        hide()
