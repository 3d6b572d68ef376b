"""Fixtures that several files of this folder share."""

import gc

import pytest
import torch

from .models import WIDTH, mlp
from .support import Pair
from .training import blocks


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def uncollected():
    """What is gone is gone at once, and waits for no collection."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def model():
    return mlp().eval()


@pytest.fixture
def x():
    return torch.randn(4, WIDTH)


@pytest.fixture
def pair(sim):
    return lambda model=None: Pair(sim, blocks.mlp() if model is None else model)


@pytest.fixture
def halved(request, pair):
    """A pair whose first is paged to half of its weights, with activations on the host if asked."""
    both = pair()
    with both.page(activations=getattr(request, "param", None)) as handle:
        both.handle = handle
        yield both
