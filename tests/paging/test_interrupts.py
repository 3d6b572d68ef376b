"""Threads that come while a model is unpaged, and forwards that end where nobody expects it."""

import copy
import threading

import pytest
import torch

from tenure.paging import page

from .models import WIDTH, mlp


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(4, WIDTH)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return mlp().eval()


@pytest.fixture
def paged(model, tmp_path):
    with page(model, "cpu", "5KiB", budget="10KiB", host=tmp_path) as handle:
        yield handle


def test_a_thread_that_waited_at_the_door_while_the_model_was_unpaged_runs_it_plainly(
    paged, model, x
):
    expected, outputs = copy.deepcopy(model)(x), []
    door = paged._pager._door

    def call():
        with torch.no_grad():
            outputs.extend(model(x) for _ in range(2))

    with door:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join(0.1)  # by then it waits
        paged.unpage()
    thread.join(10)
    assert not thread.is_alive()
    assert [output.equal(expected) for output in outputs] == [True, True]
    assert not paged._pager.is_inside
    assert not paged._pager._frames
