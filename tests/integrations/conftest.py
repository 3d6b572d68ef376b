"""What the tests of loops share."""

import os
from unittest import mock

import pytest

from tenure.adaptive import add_listener, remove_listener, reset
from tests.small_heap import hide


@pytest.fixture
def events():
    found = []
    add_listener(found.append)
    yield found
    remove_listener(found.append)


@pytest.fixture(autouse=True)
def environment():
    """Undo what training arguments set: ``ACCELERATE_*``, in transformers 4."""
    # a size that an earlier test has found would fit at once
    reset()
    # models and trainers import more of their libraries
    hide()
    with mock.patch.dict(os.environ):
        yield
    reset()
