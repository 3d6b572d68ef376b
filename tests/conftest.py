"""For every test: the simulated accelerator, and the lines of the checks on a GPU."""

from .cuda._lines import pytest_terminal_summary
from .testing._pytest_plugin import pytest_addoption, pytest_collection_modifyitems, sim

__all__ = [
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_terminal_summary",
    "sim",
]
