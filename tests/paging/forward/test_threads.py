"""Threads that call one paged model take turns, also where one of them is interrupted."""

import copy
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from tenure.paging import PagingWarning, page

from ..models import WIDTH

pytestmark = pytest.mark.usefixtures("without_gradients")


class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.may_end = threading.Event()
        self.runs = threading.Event()

    def forward(self, x):
        self.runs.set()
        assert self.may_end.wait(60)
        return self.linear(x)


def test_a_long_wait_for_another_forward_is_said_once_and_goes_on(x, tmp_path, monkeypatch):
    # four seconds otherwise
    monkeypatch.setattr("tenure.paging._pager._LONG_WAIT_S", 0.01)
    model = Slow().eval()
    with page(model, "cpu", host=tmp_path), ThreadPoolExecutor(1, "other") as pool:
        other = pool.submit(torch.no_grad()(model), x)
        assert model.runs.wait(60)
        end = threading.Timer(0.5, model.may_end.set)
        end.start()
        with pytest.warns(PagingWarning) as caught:
            output = model(x)
        end.join()
        assert torch.equal(output, other.result())
    assert len(caught) == 1
    assert str(caught[0].message).startswith(
        "Slow is paged and runs on thread 'other_0', and this thread waits until that ends"
    )
    assert caught[0].filename == __file__


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
@pytest.mark.parametrize("every", [41, pytest.param(7, marks=pytest.mark.exhaustive)])
def test_wherever_the_engine_is_interrupted_the_next_pass_is_right_and_has_its_room(
    paged, model, x, every
):
    reference, k = copy.deepcopy(model), 1
    model(x)
    while interrupted_at(k, lambda: model(x)):
        for each in (model, reference):
            each[2].weight.data.mul_(1.01)
        assert model(x).equal(reference(x))
        k += every
    assert k > 500
    assert model(x).equal(reference(x))


@pytest.mark.slow
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("verb", ["forward", "unpage"])
def test_wherever_who_goes_in_or_out_is_interrupted_each_thread_gets_in(x, tmp_path, verb, every):
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
        k += every
    assert k > 100
    handle.unpage()
    call()
    assert outputs[-1].equal(expected)
