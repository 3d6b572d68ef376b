"""Fixtures that several files of this folder share."""

import pytest
import torch

from .models import WIDTH, mlp
from .support import Pair
from .training import blocks


@pytest.fixture
def without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def model():
    torch.manual_seed(0)
    return mlp().eval()


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(4, WIDTH)


@pytest.fixture
def pair(sim):
    """Makes a pair."""

    def make(model=None):
        if model is None:
            torch.manual_seed(0)
            model = blocks.mlp()
        return Pair(sim, model)

    return make
