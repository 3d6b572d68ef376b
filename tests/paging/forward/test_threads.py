"""Threads that call one paged model: they take turns, and one that waits long is told."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from tenure.paging import PagingWarning, page
from tenure.paging._forward import _pager

from ..models import WIDTH, mlp

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
    monkeypatch.setattr(_pager, "_LONG_WAIT_S", 0.01)
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


class Interrupted(nn.Module):
    def forward(self, x):
        raise KeyboardInterrupt


def test_after_an_interrupt_another_thread_gets_in_although_the_first_never_comes_back(x, tmp_path):
    model = mlp().eval()
    expected = model(x)
    interrupted, may_end = threading.Event(), threading.Event()

    def call_and_stay():
        try:
            with torch.no_grad():
                model(x)
        except KeyboardInterrupt:
            handle.remove()
            interrupted.set()
            assert may_end.wait(60)
            seen.append(next(model.parameters()).data_ptr())
            with torch.no_grad():
                seen.append(model(x).equal(expected))

    with page(model, "cpu", "5KiB", budget="10KiB", host=tmp_path) as paged:
        address, seen = next(model.parameters()).data_ptr(), []
        handle = model[4].register_forward_pre_hook(lambda *_: Interrupted()(x))
        thread = threading.Thread(target=call_and_stay)
        thread.start()
        assert interrupted.wait(60)
        assert paged._pager._pass is None
        assert model(x).equal(expected)
        may_end.set()
        thread.join()
        assert seen == [address, True]
        assert model(x).equal(expected)


def test_a_forward_whose_thread_has_ended_keeps_nobody_out(x, tmp_path):
    model = mlp().eval()
    expected = model(x)

    def call():
        handle = model[4].register_forward_pre_hook(lambda *_: Interrupted()(x))
        try:
            model(x)
        except KeyboardInterrupt:
            handle.remove()

    with page(model, "cpu", "5KiB", budget="10KiB", host=tmp_path) as paged:
        thread = threading.Thread(target=torch.no_grad()(call))
        thread.start()
        thread.join()
        assert paged._pager._pass is None
        assert model(x).equal(expected)


@pytest.mark.filterwarnings("ignore:Sequential is paged and runs on thread")
def test_many_threads_take_turns_while_some_are_interrupted(x, tmp_path):
    model = mlp().eval()
    expected, wrong = model(x), []
    fails = threading.local()

    def maybe(*_):
        if getattr(fails, "now", False):
            raise KeyboardInterrupt

    def work(number):
        with torch.no_grad():
            for turn in range(6):
                fails.now = (turn + number) % 3 == 0
                try:
                    if not model(x).equal(expected):
                        wrong.append((number, turn))
                except KeyboardInterrupt:
                    pass

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with page(model, "cpu", "5KiB", budget="10KiB", host=tmp_path):
            model[6].register_forward_pre_hook(maybe)
            threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(120)
            assert not any(thread.is_alive() for thread in threads)
            assert wrong == []
            assert model(x).equal(expected)
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize(
    "where",
    [
        "_forward._entry.is_compiled",
        "_forward._pager.Turn.acquire",
        "_device._pass.AccessOrder.begin",
        "_device._pass.PassMeter.begin",
        "_device._engine.Engine.begin",
    ],
)
def test_a_call_that_fails_as_it_begins_lets_others_in(sim, model, x, monkeypatch, error, where):
    def fail(*_):
        raise error("as it begins")

    with page(model, sim.device, budget="12KiB"), ThreadPoolExecutor(1) as pool:
        expected = model(x)
        with monkeypatch.context() as patch:
            patch.setattr(f"tenure.paging.{where}", fail)
            with pytest.raises(error, match="as it begins"):
                model(x)
        assert torch.equal(model(x), expected)  # what is left of the call would have no room here
        assert torch.equal(pool.submit(in_inference, model, x).result(10), expected)


def in_inference(model, x):
    with torch.inference_mode():
        return model(x)
