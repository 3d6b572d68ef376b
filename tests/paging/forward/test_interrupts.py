"""Threads that come while a model is unpaged, and forwards that end where nobody expects it."""

import copy
import sys
import threading

import pytest
import torch

from tenure.paging import page
from tests.paging.test_zoo import assert_equal

pytestmark = pytest.mark.usefixtures("without_gradients")


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

    with door._lock:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join(0.1)  # by then it waits
        paged.unpage()
    thread.join(10)
    assert not thread.is_alive()
    assert [output.equal(expected) for output in outputs] == [True, True]
    assert not paged._pager.is_inside
    assert paged._pager._pass is None


class Interrupted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.is_on = False

    def forward(self, x):
        if self.is_on:
            raise KeyboardInterrupt
        return x


def test_after_an_interrupt_the_next_reader_sees_the_host(model, x, tmp_path):
    model.insert(5, Interrupted())
    before = copy.deepcopy(model.state_dict())
    with page(model, "cpu", "5KiB", budget="10KiB", host=tmp_path):
        addresses = [parameter.data_ptr() for parameter in model.parameters()]
        model(x)
        model[5].is_on = True
        with pytest.raises(KeyboardInterrupt):
            model(x)
        assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
        assert_equal(model.state_dict(), before)


def interrupted_at(k, call):
    """Have a call interrupted at the k-th line of the engine and its room; whether it got there."""
    n_lines = 0

    def count(frame, event, _):
        nonlocal n_lines
        n_lines += event == "line"
        if n_lines == k:
            sys.settrace(None)
            raise KeyboardInterrupt
        return count

    def choose(frame, event, _):
        file = frame.f_code.co_filename
        return (
            count if file.endswith(("_engine.py", "_room.py", "_memory.py", "_page.py")) else None
        )

    before = sys.gettrace()
    sys.settrace(choose)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_wherever_the_engine_is_interrupted_the_next_pass_is_right_and_has_its_room(
    paged, model, x
):
    reference, k = copy.deepcopy(model), 1
    model(x)
    while interrupted_at(k, lambda: model(x)):
        for each in (model, reference):
            each[2].weight.data.mul_(1.01)
        assert model(x).equal(reference(x))
        k += 7
    assert k > 500
    assert model(x).equal(reference(x))
