"""Threads that come while a model is unpaged, and forwards that end where nobody expects it."""

import copy
import sys
import threading

import pytest
import torch

from tenure.paging import page
from tests.paging.models import WIDTH
from tests.paging.test_zoo import assert_equal

pytestmark = pytest.mark.usefixtures("without_gradients")


@pytest.fixture
def paged(model, tmp_path):
    with page(model, "cpu", "5KiB", budget="10KiB", host=tmp_path) as handle:
        yield handle


def test_a_thread_that_waited_while_the_model_was_unpaged_runs_it_plainly(paged, model, x):
    expected, outputs = copy.deepcopy(model)(x), []
    runs, may_end = threading.Event(), threading.Event()

    def call():
        with torch.no_grad():
            outputs.extend(model(x) for _ in range(2))

    def unpage_inside(*_):
        handle.remove()
        runs.set()
        assert may_end.wait(10)
        paged.unpage()

    handle = model[4].register_forward_hook(unpage_inside)
    first = threading.Thread(target=call)
    first.start()
    assert runs.wait(10)
    second = threading.Thread(target=call)
    second.start()
    second.join(0.1)  # by then it waits
    may_end.set()
    first.join(10)
    second.join(10)
    assert not first.is_alive()
    assert not second.is_alive()
    assert [output.equal(expected) for output in outputs] == [True] * 4
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


def interrupted_at(k, call, files=("_engine.py", "_room.py", "_memory.py", "_page.py"), of="line"):
    """Have a call interrupted at the k-th line or opcode in some files; whether it got there."""
    n_events = 0

    def count(frame, event, _):
        nonlocal n_events
        n_events += event == of
        if n_events == k:
            sys.settrace(None)
            raise KeyboardInterrupt
        return count

    def choose(frame, event, _):
        if not frame.f_code.co_filename.endswith(files):
            return None
        frame.f_trace_opcodes = of == "opcode"
        return count

    before = sys.gettrace()
    # Python 3.12 tells of opcodes if a frame asked for them before the trace began
    sys._getframe().f_trace_opcodes = of == "opcode"
    sys.settrace(choose)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.slow
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


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 41])
@pytest.mark.parametrize("verb", ["forward", "unpage"])
def test_wherever_who_goes_in_or_out_is_interrupted_each_thread_gets_in(x, tmp_path, verb, step):
    if verb == "unpage" and sys.version_info >= (3, 13):
        pytest.skip("from Python 3.13 on a trace is not told of every instruction")
    files = ("_pager.py", "_entry.py", "_pass.py", "_handle.py")
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH)).eval()
    expected, k, outputs = model(x), 1, []

    def call():
        with torch.no_grad():
            outputs.append(model(x))

    def paged_anew():
        handle = page(model, "cpu", budget="1MiB", host=tmp_path)
        call()
        return handle

    handle = paged_anew()
    while interrupted_at(k, call if verb == "forward" else handle.unpage, files, "opcode"):
        other = threading.Thread(target=call, daemon=True)
        if k % 2:
            call()
        other.start()
        other.join(20)
        assert not other.is_alive(), k
        call()
        if verb == "unpage":
            handle.unpage()
            handle = paged_anew()
        assert [each.equal(expected) for each in outputs] == [True] * len(outputs), k
        outputs.clear()
        k += step
    assert k > 100
    handle.unpage()
    call()
    assert outputs[-1].equal(expected)
