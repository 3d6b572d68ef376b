"""Backward passes run on the streams of their forward, and wait where CUDA's autograd waits."""

import threading

import pytest
import torch

from tenure.testing import RaceError


@pytest.fixture
def side(sim):
    made = sim.module.Stream()
    made.wait_stream(sim.module.current_stream())
    return made


def leaf(sim):
    return torch.ones(4, device=sim.device, requires_grad=True)


def noting(sim, streams):
    return lambda *_: streams.append(sim.module.current_stream())


def forward_on(sim, stream, x):
    stream.wait_stream(sim.module.current_stream())
    with sim.module.stream(stream):
        y = x.exp()
    sim.module.current_stream().wait_stream(stream)
    return y


def test_each_node_runs_on_the_stream_of_its_forward(sim, side):
    x, streams = leaf(sim), []
    y = x.exp()
    z = forward_on(sim, side, y)
    loss = z.sum()
    for tensor in (x, y, z):
        tensor.register_hook(noting(sim, streams))
    default = sim.module.current_stream()
    loss.backward()
    assert streams == [side, default, default]
    assert torch.equal(x.grad, (y * z).detach())


def test_the_stream_around_backward_waits_for_the_pass_and_no_other_does(sim, side):
    x = leaf(sim)
    loss = forward_on(sim, side, x).sum()
    other = sim.module.Stream()
    other.wait_stream(sim.module.current_stream())
    with sim.module.stream(other):
        loss.backward()
        assert x.grad.sum().item() > 0
    x.grad = None
    loss = forward_on(sim, side, x).sum()
    with sim.module.stream(side):
        loss.backward()
    with sim.module.stream(other), pytest.raises(RaceError, match="no wait orders the two"):
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


def test_work_of_a_hook_is_on_the_stream_of_the_forward_and_must_be_ordered(sim, side):
    x, counts = leaf(sim), torch.zeros(4, device=sim.device)
    loss = forward_on(sim, side, x).sum()
    x.register_hook(lambda grad: counts.add_(1))
    loss.backward()
    assert counts.tolist() == [1] * 4
    other = sim.module.Stream()
    other.wait_stream(sim.module.current_stream())
    loss = forward_on(sim, side, x).sum()
    with sim.module.stream(other):
        counts.add_(1)
    with pytest.raises(RaceError, match="no wait orders the two"):
        loss.backward()
    sim.take_faults()
    sim.module.synchronize()


def test_two_branches_on_two_streams_meet(sim, side):
    x, other = leaf(sim), sim.module.Stream()
    branches = [forward_on(sim, stream, x) for stream in (side, other)]
    (branches[0] * branches[1]).sum().backward()
    expected = (2 * branches[0] * branches[1]).detach()
    torch.testing.assert_close(x.grad, expected)
    (grad,) = torch.autograd.grad((forward_on(sim, side, x) * forward_on(sim, other, x)).sum(), x)
    torch.testing.assert_close(grad, expected)


def test_a_graph_that_was_made_before_the_stream_changed_runs_where_it_was_made(sim, side):
    x, streams = leaf(sim), []
    y = x.exp()
    x.register_hook(noting(sim, streams))
    default = sim.module.current_stream()
    side.wait_stream(default)
    with sim.module.stream(side):
        y.sum().backward()
    assert streams == [default]
    default.wait_stream(side)


def test_a_checkpoint_recomputes_on_the_stream_of_its_node(sim, side):
    x, streams = leaf(sim), []

    def block(x):
        streams.append(sim.module.current_stream())
        return x.exp().sin()

    side.wait_stream(sim.module.current_stream())
    with sim.module.stream(side):
        loss = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).sum()
    sim.module.current_stream().wait_stream(side)
    loss.backward()
    assert streams == [side, side]
    assert x.grad.isfinite().all()


def test_a_pass_that_fails_leaves_the_streams_as_they_were(sim, side):
    x, streams = leaf(sim), []

    def fail(grad):
        raise KeyError("hook")

    handle = x.register_hook(fail)
    loss = forward_on(sim, side, x).sum()
    with pytest.raises(KeyError, match="hook"):
        loss.backward(retain_graph=True)
    handle.remove()
    x.register_hook(noting(sim, streams))
    loss.backward()
    assert streams == [side]
    assert sim.module.current_stream() is sim.module.default_stream()


def test_a_thread_of_its_own_runs_its_pass_where_its_forward_ran(sim, side):
    x, streams = leaf(sim), []
    x.register_hook(noting(sim, streams))
    sim.module.synchronize()

    def work():
        forward_on(sim, side, x).sum().backward()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert streams == [side]
    sim.module.synchronize()


def test_devices_have_streams_of_their_own_in_a_pass(sim):
    sim(devices=2)
    side = sim.module.Stream("sim:1")
    x, streams = torch.ones(4, device="sim:1", requires_grad=True), []
    x.register_hook(lambda grad: streams.append(sim.module.current_stream("sim:1")))
    side.wait_stream(sim.module.current_stream("sim:1"))
    with sim.module.stream(side):
        y = x.exp()
    sim.module.current_stream("sim:1").wait_stream(side)
    y.sum().backward()
    assert streams == [side]


def test_a_leaf_and_its_gradient_go_with_their_last_name(sim, side):
    x = leaf(sim)
    forward_on(sim, side, x).sum().backward()
    assert x.grad is not None
    del x
    assert sim.allocated_bytes == 0


def test_a_callback_at_the_end_runs_on_the_stream_around_the_pass_after_all_nodes(sim, side):
    x, streams = leaf(sim), []

    def end():
        streams.append(sim.module.current_stream())
        x.grad.mul_(2)

    def ask(_):
        torch.autograd.Variable._execution_engine.queue_callback(end)

    z = forward_on(sim, side, x)
    z.register_hook(ask)
    loss = z.sum()
    loss.backward()
    assert streams == [sim.module.current_stream()]
    assert torch.equal(x.grad, 2 * z.detach())
