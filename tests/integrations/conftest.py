"""What the tests of loops share."""

import pytest

from tenure.adaptive import add_listener, remove_listener, reset


@pytest.fixture
def events():
    """What retries tell."""
    # a size that an earlier test has found would fit at once
    reset()
    found = []
    add_listener(found.append)
    yield found
    remove_listener(found.append)
