"""What the tests of loops share."""

import os
from unittest import mock

import pytest

from tenure.adaptive import add_listener, remove_listener, reset


@pytest.fixture
def events():
    # a size that an earlier test has found would fit at once
    reset()
    found = []
    add_listener(found.append)
    yield found
    remove_listener(found.append)


@pytest.fixture(autouse=True)
def environment():
    """Undo what training arguments set: ``ACCELERATE_*``, in transformers 4."""
    with mock.patch.dict(os.environ):
        yield
