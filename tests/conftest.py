"""Fixtures for every test: the simulated accelerator."""

from .simdevice._pytest_plugin import pytest_collection_modifyitems, sim

__all__ = ["pytest_collection_modifyitems", "sim"]
