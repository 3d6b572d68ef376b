"""Compiled code gets chunks of all sizes, and is compiled once for them."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from tenure.adaptive import NoBatchsizeCache, chunked, step

from ...programs import run_program
from ..step.step_cases import gradients, small_net, worst_error

pytestmark = pytest.mark.usefixtures("fresh_compiler")
SIZES = (32, 7, 13, 2)


def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(66, 4, dtype=torch.float64), "y": torch.randint(3, (66,))}


def loss_by(net):
    return lambda b: nn.functional.cross_entropy(net(b["x"]), b["y"])


@pytest.mark.slow
def test_a_step_compiles_one_graph_for_any_number_of_sizes():
    net, b = small_net(), batch()
    loss_by(net)(b).backward()
    wanted = gradients(net)
    counter = CompileCounterWithBackend("aot_eager")
    fn = loss_by(torch.compile(net, backend=counter))
    for size in (66, *SIZES):
        net.zero_grad()
        step(fn, b, maximum=size)
        assert worst_error(gradients(net), wanted) <= 1e-10
    assert counter.frame_count == 1


def test_the_batch_of_the_user_keeps_no_mark():
    net, b = small_net(), batch()
    compiled = torch.compile(net, backend="eager")
    step(loss_by(compiled), b)
    assert vars(b["x"]) == {}
    torch._dynamo.mark_static(b["x"], 0)
    marks = dict(vars(b["x"]))
    step(loss_by(compiled), b)
    assert vars(b["x"]) == marks


def test_chunked_compiles_one_graph_for_any_number_of_sizes():
    counter = CompileCounterWithBackend("aot_eager")
    square = torch.compile(lambda chunk: chunk.square() + 1, backend=counter)
    x = batch()["x"]
    for size in SIZES:

        @chunked(initial_step=size, collect="cat", cache_type=NoBatchsizeCache)
        def squared(chunk, start, end):
            return square(chunk)

        assert torch.equal(squared(x[: len(x) // size * size]), x[: len(x) // size * size] ** 2 + 1)
    assert counter.frame_count == 1


@pytest.mark.slow
def test_a_step_that_compiles_nothing_does_not_load_dynamo():
    program = """
import sys, torch
from tenure.adaptive import step
net = torch.nn.Linear(4, 1)
step(lambda b: net(b).mean(), torch.randn(8, 4), maximum=4)
print("torch._dynamo" in sys.modules)
"""
    done = run_program(program)
    assert (done.stdout, done.stderr) == ("False\n", "")
