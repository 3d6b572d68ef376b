"""Fixtures of recorded tensors: a model and a batch for it."""

import pytest

from .programs import batch, mlp


@pytest.fixture
def model():
    return mlp()


@pytest.fixture
def x():
    return batch()[0]


@pytest.fixture
def y():
    return batch()[1]
