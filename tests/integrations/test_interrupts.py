"""Ctrl-C in a step of an integration: what it has set aside for the step is back after it.

Private names are asked, because a step of a library looks for Ctrl-C at too many other moments.
"""

import signal
import sys
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tenure.integrations._lightning._deferred import DeferredGradients
from tenure.integrations._lightning._metrics import MetricRecorder
from tenure.integrations._lightning._recorder import StepRecorder, recorder_of


@contextmanager
def interrupted_at(moment, file):
    """A block with Ctrl-C at one of the moments at which Python looks for it in code of a file."""
    seen, told = count(), []

    def look(frame, event, arg):
        # where a function begins, and where one in C has returned
        is_there = event in ("call", "c_return") and frame.f_code.co_filename.endswith(file)
        if is_there and next(seen) == moment:
            sys.setprofile(None)
            told.append(moment)
            signal.raise_signal(signal.SIGINT)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield told
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(before)


# that of a generator which is let go is ignored by Python
@pytest.mark.filterwarnings("ignore:Exception ignored (in|while closing)")
def test_gradients_and_hooks_are_back_whenever_a_deferred_step_is_interrupted():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).double()
    x = torch.ones(2, 3, dtype=torch.float64)
    net(x).sum().backward()
    calls = []
    for leaf in net.parameters():
        leaf.register_hook(calls.append)
    before = [leaf.grad for leaf in net.parameters()]
    for moment in count():
        calls.clear()
        deferred = DeferredGradients(net.parameters())
        with interrupted_at(moment, "_deferred.py") as told:
            deferred.making(lambda: net(x).sum().backward())
        after = [leaf.grad for leaf in net.parameters()]
        assert all(ours is old for ours, old in zip(after, before, strict=True))
        assert not calls
        net(x).sum().backward()
        assert len(calls) == len(before)
        if not told:
            break
    assert moment > 20


def test_an_accelerator_runs_backward_again_whenever_it_was_interrupted():
    transformers = pytest.importorskip("tenure.integrations._transformers")
    accelerator, losses = SimpleNamespace(), []
    for moment in count():
        with interrupted_at(moment, "_taken.py") as told:
            losses = transformers.losses_taken(accelerator, lambda: accelerator.backward("loss"))
        assert vars(accelerator) == {}
        if not told:
            break
    assert losses == ["loss"]
    assert moment > 2


def test_a_module_logs_to_its_trainer_again_whenever_it_was_interrupted():
    module = nn.Module()
    for moment in count():
        recorder = StepRecorder(module, None, (), {}, {})
        with interrupted_at(moment, "_recorder.py") as told:
            assert recorder.hearing(lambda: recorder_of(module)) is recorder
        assert recorder_of(module) is None
        if not told:
            break
    assert moment > 2


def test_metrics_count_again_whenever_they_were_interrupted():
    torchmetrics = pytest.importorskip("torchmetrics")
    module = nn.Module()
    module.mean = torchmetrics.MeanMetric()
    for moment in count():
        calls = []
        recorder = MetricRecorder(module)
        with interrupted_at(moment, "_metrics.py") as told:
            recorder.run(calls, lambda: module.mean.update(torch.ones(2)))
        module.mean.reset()
        module.mean.update(torch.full((2,), 3.0))
        assert module.mean.compute() == 3
        if not told:
            break
    assert len(calls) == 1
    assert moment > 20
