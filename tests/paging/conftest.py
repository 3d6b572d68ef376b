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
