"""Backward passes run on the streams that are current around them."""

import pytest
import torch

from tenure.testing import RaceError


@pytest.fixture
def side(sim):
    made = sim.module.Stream()
    made.wait_stream(sim.module.current_stream())
    return made


def leaf(sim, device="sim:0"):
    return torch.ones(4, device=device, requires_grad=True)


def test_nodes_hooks_and_callbacks_run_on_the_stream_around_the_pass(sim, side):
    x, streams = leaf(sim), []

    def note(*_):
        streams.append(sim.module.current_stream())

    def ask(_):
        note()
        torch.autograd.Variable._execution_engine.queue_callback(note)

    y = x.exp()
    y.register_hook(ask)
    loss = y.sum()
    side.wait_stream(sim.module.current_stream())
    with sim.module.stream(side):
        loss.backward()
    assert streams == [side, side]
    with pytest.raises(RaceError, match="no wait orders the two"):
        x.grad.sum()
    sim.take_faults()
    sim.module.synchronize()


def test_a_gradient_that_a_hook_makes_elsewhere_is_used_without_a_wait(sim, side):
    x = leaf(sim)

    def make_elsewhere(grad):
        side.wait_stream(sim.module.current_stream())
        with sim.module.stream(side):
            return grad * 2

    y = x.exp()
    y.register_hook(make_elsewhere)
    with pytest.raises(RaceError, match=r"stream 0 reads .* that stream \d+"):
        y.sum().backward()
    sim.take_faults()
    sim.module.synchronize()


def test_devices_have_streams_of_their_own_in_a_pass(sim):
    sim(devices=2)
    side = sim.module.Stream("sim:1")
    x, streams = leaf(sim, "sim:1"), []
    x.register_hook(lambda grad: streams.append(sim.module.current_stream("sim:1")))
    side.wait_stream(sim.module.current_stream("sim:1"))
    with sim.module.stream(side):
        x.exp().sum().backward()
    assert streams == [side]
    side.synchronize()
