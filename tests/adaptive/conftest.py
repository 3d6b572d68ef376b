"""Fixtures that several files of this folder share: functions that run out of memory."""

import gc
import logging

import pytest

from tenure import adaptive

from .attempt.failures import oom


@pytest.fixture(autouse=True)
def forgetful():
    """No size is known, before and afterwards."""
    adaptive.reset()
    yield
    adaptive.reset()


@pytest.fixture
def quiet():
    """Retries and growths are not logged."""
    logging.getLogger("tenure.adaptive").setLevel(logging.ERROR)
    yield
    logging.getLogger("tenure.adaptive").setLevel(logging.NOTSET)


@pytest.fixture
def no_gc():
    """What goes does so without the collector."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def sizes():
    return []


@pytest.fixture
def only_16(sizes):
    """Fits at 16 and nowhere else."""

    def f(batchsize):
        sizes.append(batchsize)
        if batchsize != 16:
            oom()
        return batchsize

    return f
