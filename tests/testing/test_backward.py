import contextlib
import threading

import pytest
import torch

from tests.programs import run_program


class HookError(Exception):
    pass


def fail(*args):
    raise HookError("raised by a hook")


def leaf(sim):
    return torch.ones(4, device=sim.device, requires_grad=True)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        fail()


def of_a_tensor(x):
    x.register_hook(fail)
    return x.exp()


def after_accumulation(x):
    x.register_post_accumulate_grad_hook(fail)
    return x.exp()


def of_unpacking(x):
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, fail):
        return (x * 2).exp()


@pytest.mark.parametrize("make", [of_a_tensor, after_accumulation, of_unpacking, Failing.apply])
def test_an_error_of_a_hook_reaches_the_caller_and_the_next_pass_is_right(sim, make):
    y = leaf(sim)
    with pytest.raises(HookError, match="raised by a hook"):
        make(leaf(sim)).sum().backward()
    (y * 2).sum().backward()
    assert y.grad.tolist() == [2, 2, 2, 2]


def test_running_out_of_memory_in_backward_reaches_the_caller_and_leaves_it_repeatable(sim):
    x = torch.ones(100, device=sim.device, requires_grad=True)
    loss = x.exp().sum()
    sim.budget_bytes = sim.allocated_bytes + 100
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 400 bytes\."):
        loss.backward(retain_graph=True)
    sim.budget_bytes = None
    loss.backward()
    torch.testing.assert_close(x.grad, x.detach().exp())


@pytest.mark.parametrize("retains", [False, True])
def test_memory_is_exact_as_soon_as_a_pass_has_ended(sim, retains):
    x = torch.ones(100, device=sim.device, requires_grad=True)
    resting_bytes = sim.allocated_bytes
    for number in range(1, 60):
        sim.fail_at(3 + number % 3)
        with contextlib.suppress(torch.OutOfMemoryError):
            x.exp().sin().sum().backward(retain_graph=retains)
        x.grad = None
        assert sim.allocated_bytes == resting_bytes


def test_threads_that_fail_together_each_raise_an_error_of_a_hook(sim):
    raised = []

    def work():
        for _ in range(10):
            x = leaf(sim)
            x.register_hook(fail)
            try:
                (x * 2).sum().backward()
            except Exception as error:
                raised.append(type(error))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert raised == [HookError] * 40


@pytest.mark.slow
def test_the_device_may_come_after_the_first_backward_pass_of_the_process():
    done = run_program(
        """
import torch
from torch import nn
from tenure.paging import page
from tenure.testing import simulated_accelerator

torch.ones(3, requires_grad=True).sum().backward()
model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
with simulated_accelerator() as sim:
    x = torch.ones(3, device=sim.device, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: 1 / 0)
    try:
        y.sum().backward()
    except ZeroDivisionError:
        del y
    assert sim.allocated_bytes == x.nbytes
    side = sim.module.Stream()
    side.wait_stream(sim.module.current_stream())
    with sim.module.stream(side):
        z = x.exp()
    sim.module.current_stream().wait_stream(side)
    (gradient,) = torch.autograd.grad(z.sum(), [x])
    assert torch.equal(gradient, z)
    with page(model, sim.device, budget="1KiB", training=True, activations="host"):
        model(torch.ones(2, 8, device=sim.device)).sum().backward()
    assert model[3].bias.grad.tolist() == [2.0] * 8
print("done")
"""
    )
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr
