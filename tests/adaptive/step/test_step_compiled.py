"""Compiled steps and chunks: one graph for all sizes, and the gradients of the whole batch."""

import pytest
import torch
from torch import nn
from torch._dynamo.convert_frame import register_bytecode_hook
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tenure.adaptive import (
    AdaptiveUsageError,
    BatchCoupledError,
    NoBatchsizeCache,
    SplitMismatchError,
    check_split,
    chunked,
    find_batch_size,
    plan,
    predict_peak,
    statistics,
    step,
)
from tests.needs import needs_torch
from tests.programs import run_program

from .step_cases import gradients, wanted_of, worst_error

# dynamo reads it of every tensor that a block gets, in a plain loop as well
pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace"),
]
SIZES = (66, 64, 32, 13, 7, 2)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + F.gelu(self.linear(x))


class Net(nn.Module):
    def __init__(self, width=6, checkpoints=False, breaks=False):
        super().__init__()
        self.first, self.last = nn.Linear(4, width), nn.Linear(width, 3)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.checkpoints, self.breaks = checkpoints, breaks

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
            if self.breaks:
                torch._dynamo.graph_break()
        return self.last(x)


def made(n=66, device="cpu", **options):
    """A net and a batch for it."""
    torch.manual_seed(0)
    net = Net(**options).double().to(device)
    x, y = torch.randn(n, 4, dtype=torch.float64), torch.randint(3, (n,))
    return net, {"x": x.to(device), "y": y.to(device)}


def loss_by(net, criterion=F.cross_entropy):
    return lambda b: criterion(net(b["x"]), b["y"])


def train(net, fn, b, wanted, sizes=SIZES):
    """Steps in micro-batches of each size give the gradients of the whole."""
    for size in sizes:
        net.zero_grad()
        assert step(fn, b, maximum=size).micro_batch == size
        assert worst_error(gradients(net), wanted) <= 1e-10


@pytest.fixture
def counter():
    return CompileCounterWithBackend("aot_eager")


def _blocks_in_place(net, counter):
    for block in net.blocks:
        block.compile(backend=counter)
    return loss_by(net)


FORMS = {
    "the model": lambda net, c: loss_by(torch.compile(net, backend=c)),
    "the function": lambda net, c: torch.compile(loss_by(net), backend=c, fullgraph=True),
    "blocks in place": _blocks_in_place,
    "the loss": lambda net, c: loss_by(net, torch.compile(F.cross_entropy, backend=c)),
    "checkpoints": lambda net, c: loss_by(torch.compile(net, backend=c)),
}
# older ones run it uncompiled, in plain programs as well
_NEEDS = {"the loss": needs_torch("2.11", "torch.compile of a function of torch.nn.functional")}


@pytest.mark.parametrize("form", [pytest.param(form, marks=_NEEDS.get(form, ())) for form in FORMS])
def test_all_sizes_run_one_graph_and_give_the_gradients_of_the_whole(form, counter):
    net, b = made(checkpoints=form == "checkpoints")
    wanted = wanted_of(net, loss_by(net)(b))
    fn = FORMS[form](net, counter)
    train(net, fn, b, wanted)
    assert counter.frame_count == 1
    if form == "the model":
        # a last sample gets a partner, and single samples are another graph
        step(fn, {name: value[:9] for name, value in b.items()}, maximum=4)
        assert counter.frame_count == 1
        step(fn, {name: value[:9] for name, value in b.items()}, maximum=1)
        assert counter.frame_count == 2


def test_two_passes_run_one_graph_and_draw_the_same_numbers(counter):
    net, outputs = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.3)).double(), []
    compiled = torch.compile(net, backend=counter)

    def loss(out):
        outputs.append(out.detach())
        return out.square().sum()

    for size in (40, 16):
        net.zero_grad()
        step(compiled, torch.randn(40, 8).double(), loss=loss, maximum=size, verify=False)
        wanted = (2 * outputs[-1] / 0.7).sum(0)
        assert torch.allclose(net[0].bias.grad, wanted, rtol=1e-10)
    assert counter.frame_count == 1


def test_a_compiled_loss_that_modules_break_has_one_graph_for_each_part(counter):
    found = []
    hook = register_bytecode_hook(lambda code, new: found.append(code))
    net, b = made(breaks=True)
    wanted = wanted_of(net, loss_by(net)(b))
    compiled = torch.compile(loss_by(net), backend=counter)
    step(compiled, b)
    n_graphs = counter.frame_count
    assert n_graphs > 1
    train(net, compiled, b, wanted)
    hook.remove()
    assert counter.frame_count == n_graphs
    assert found
    assert [code for code in found if "/tenure/" in code.co_filename] == []


def test_nothing_is_compiled_to_look_at_a_step(counter):
    net, b = made()
    fn = loss_by(torch.compile(net, backend=counter))
    assert check_split(fn, b).ok
    told = "compiled code is predicted as it is written, and may take more or less"
    assert told in plan(fn, b, "1MiB").reasons
    assert told in predict_peak(fn, b).reasons

    def train(n):
        fn({name: value[:n] for name, value in b.items()}).backward()

    # a budget has to count, so that what runs in it is not compiled
    assert find_batch_size(train, high=66, budget="16KiB") > 1
    with pytest.raises(SplitMismatchError):
        step(lambda b: fn(b).sqrt(), b, maximum=20)
    assert counter.frame_count == 0


def test_what_mixes_samples_is_refused_in_compiled_code_too(counter):
    net, (_, b) = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)), made()
    compiled = torch.compile(net.double(), backend=counter)
    # a method, which is bound by its decorator
    method = torch.compile(lambda self, x: loss_by(self.net)(x), backend=counter)
    holder = type("Trainer", (), {"net": net, "loss": method})()
    for fn in (loss_by(compiled), holder.loss):
        with pytest.raises(BatchCoupledError, match="BatchNorm1d"):
            step(fn, b, maximum=20)
    outcomes = []
    for model in (net, compiled):
        net.zero_grad()
        net[1].reset_running_stats()
        step(loss_by(model), b, maximum=20, batchnorm="per_chunk")
        outcomes.append(gradients(net) | {"mean": net[1].running_mean.clone()})
    assert worst_error(*outcomes) <= 1e-10


def test_dropout_that_a_backward_pass_may_draw_anew_is_refused(counter):
    net = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.3)).double()
    fn = torch.compile(lambda x: net(x).square().mean(), backend=counter)
    x = torch.randn(40, 8).double()
    with torch._functorch.config.patch(activation_memory_budget=0.1):
        with pytest.raises(AdaptiveUsageError, match="activation_memory_budget is below 1"):
            step(fn, x, maximum=16)
        assert net[0].weight.grad is None
        net.eval()
        step(fn, x, maximum=16)


@pytest.mark.sim_allocator("exact")
@pytest.mark.parametrize("predict", [True, False])
def test_a_size_that_does_not_fit_costs_no_graph_and_a_prediction_compiles_none(
    sim, predict, counter
):
    net, b = made(300, sim.device, width=32)
    before = sim.allocated_bytes
    loss_by(net)(b).backward()
    whole_bytes = sim.peak_bytes - before
    wanted = gradients(net.cpu())
    net.to(sim.device).zero_grad()
    fn = FORMS["the model"](net, counter)
    sim.budget_bytes = before + whole_bytes // 3
    statistics().reset()
    result = step(fn, b, predict=predict)
    assert (statistics().ooms == 0) == predict
    assert sim.peak_bytes <= sim.budget_bytes or predict
    assert 20 < result.micro_batch < 110
    sim.budget_bytes = None
    assert worst_error(gradients(net.cpu()), wanted) <= 1e-10
    assert counter.frame_count == 1


@pytest.mark.slow
def test_the_default_compiler_gives_the_gradients_of_the_whole():
    pytest.importorskip("torch._inductor")
    try:
        torch._inductor.cpp_builder.get_cpp_compiler()
    except Exception as error:
        pytest.skip(f"no C++ compiler: {error}")
    _, b = made()
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    wanted = wanted_of(net, loss_by(net)(b))
    train(net, loss_by(torch.compile(net)), b, wanted, (66, 7))


def test_the_batch_of_the_user_keeps_no_mark():
    net, b = made()
    compiled = torch.compile(net, backend="eager")
    step(loss_by(compiled), b)
    assert vars(b["x"]) == {}
    torch._dynamo.mark_static(b["x"], 0)
    marks = dict(vars(b["x"]))
    step(loss_by(compiled), b)
    assert vars(b["x"]) == marks


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


def test_chunks_of_any_number_of_sizes_run_one_graph(counter):
    square = torch.compile(lambda chunk: chunk.square() + 1, backend=counter)
    _, b = made()
    for size in SIZES:

        @chunked(initial_step=size, collect="cat", cache_type=NoBatchsizeCache)
        def squared(chunk, start, end):
            return square(chunk)

        x = b["x"][: 66 // size * size]
        assert torch.equal(squared(x), x**2 + 1)
    assert counter.frame_count == 1
