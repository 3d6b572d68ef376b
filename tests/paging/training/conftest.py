"""Models that train with activations on the device, and on the host."""

import pytest

on_host = pytest.mark.parametrize("halved", ["host"], indirect=True)
either_way = pytest.mark.parametrize("halved", [None, "host"], indirect=True)
"""With activations on the device, and on the host."""


@pytest.fixture
def halved(request, pair):
    """A pair whose first is paged to half of its weights."""
    both = pair()
    with both.page(activations=getattr(request, "param", None)) as handle:
        both.handle = handle
        yield both
