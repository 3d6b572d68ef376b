"""Compiled training steps: one graph for all sizes, and the gradients of the whole batch."""

import itertools
from threading import Event, Thread

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tenure.adaptive import (
    AdaptiveUsageError,
    BatchCoupledError,
    SplitMismatchError,
    check_split,
    find_batch_size,
    plan,
    predict_peak,
    statistics,
    step,
)
from tests.compiling import forget_compiled
from tests.needs import needs_torch

# dynamo reads it of every tensor that a block gets, in a plain loop as well
pytestmark = [
    pytest.mark.usefixtures("forgetful", "fresh_compiler"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
SIZES = (66, 64, 20, 7, 2)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + F.gelu(self.linear(self.norm(x)))


class Net(nn.Module):
    def __init__(self, width=6, checkpoints=False):
        super().__init__()
        self.first, self.last = nn.Linear(4, width), nn.Linear(width, 3)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.checkpoints = checkpoints

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.last(x)


def net_of(*args, device="cpu", **options):
    torch.manual_seed(0)
    return Net(*args, **options).double().to(device)


def batch_of(n=66, device="cpu"):
    torch.manual_seed(1)
    x, y = torch.randn(n, 4, dtype=torch.float64), torch.randint(3, (n,))
    return {"x": x.to(device), "y": y.to(device)}


def loss_by(net, criterion=F.cross_entropy):
    return lambda b: criterion(net(b["x"]), b["y"])


def gradients(net):
    found = [p.grad.cpu().clone() for p in net.parameters()]
    net.zero_grad()
    return found


def far(ours, wanted):
    pairs = zip(ours, wanted, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.fixture
def counter():
    return CompileCounterWithBackend("aot_eager")


def _blocks_in_place(net, counter):
    for block in net.blocks:
        block.compile(backend=counter)
    return loss_by(net)


def _blocks_wrapped(net, counter):
    for i, block in enumerate(net.blocks):
        net.blocks[i] = torch.compile(block, backend=counter)
    return loss_by(net)


def _in_place(net, counter):
    net.compile(backend=counter)
    return loss_by(net)


FORMS = {
    "the model": lambda net, c: loss_by(torch.compile(net, backend=c)),
    "in place": _in_place,
    "its forward": lambda net, c: loss_by(torch.compile(net.forward, backend=c)),
    "the function": lambda net, c: torch.compile(loss_by(net), backend=c, fullgraph=True),
    "static": lambda net, c: loss_by(torch.compile(net, backend=c, dynamic=False)),
    "blocks in place": _blocks_in_place,
    "blocks wrapped": _blocks_wrapped,
    "the loss": lambda net, c: loss_by(net, torch.compile(F.cross_entropy, backend=c)),
}


# of the others, what is compiled is a part of one of these, or one of these in other words
_QUICK = ("the model", "the function", "blocks in place", "the loss")
_MARKS = {form: [] if form in _QUICK else [pytest.mark.slow] for form in FORMS}
# older ones run it uncompiled, in plain programs as well
_MARKS["the loss"].append(needs_torch("2.11", "torch.compile of a function of torch.nn.functional"))


@pytest.mark.parametrize("form", [pytest.param(f, marks=_MARKS[f]) for f in FORMS])
def test_all_sizes_run_one_graph_and_give_the_gradients_of_the_whole(form, counter):
    net, plain, b = net_of(), net_of(), batch_of()
    loss_by(plain)(b).backward()
    wanted = gradients(plain)
    fn = FORMS[form](net, counter)
    for size in SIZES:
        step(fn, b, maximum=size)
        assert far(gradients(net), wanted) <= 1e-10
    assert counter.frame_count == 1


@pytest.mark.slow
def test_sizes_that_change_all_the_time_are_the_same_graph_as_any_that_is_marked(counter):
    # dynamo itself compiles this one twice: it makes a number of the norm's a symbol, and restarts
    net, b = net_of(), batch_of()
    fn = loss_by(torch.compile(net, backend=counter, dynamic=True))
    step(fn, b)
    n_graphs = counter.frame_count
    for size in SIZES:
        step(fn, b, maximum=size)
    assert counter.frame_count == n_graphs


TWO_PASSES = {
    "outputs": (lambda o, y: o, {"loss": lambda o: o.logsumexp(0).sum()}),
    "counts": (
        lambda o, y: {
            "ce": (F.cross_entropy(o, y, reduction="sum"), len(y)),
            "size": (o.square().sum(), o.numel()),
        },
        {},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", TWO_PASSES)
def test_two_passes_run_one_graph(kind, counter):
    of, options = TWO_PASSES[kind]
    net, b = net_of(), batch_of()
    step(lambda b: of(net(b["x"]), b["y"]), b, **options)
    wanted = gradients(net)
    compiled = torch.compile(net, backend=counter)
    for size in SIZES:
        step(lambda b: of(compiled(b["x"]), b["y"]), b, maximum=size, **options)
        assert far(gradients(net), wanted) <= 1e-10
    assert counter.frame_count == 1


def test_both_passes_draw_the_same_numbers(counter):
    net, outputs = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.3)).double(), []
    compiled = torch.compile(net, backend=counter)

    def loss(out):
        outputs.append(out.detach())
        return out.square().sum()

    step(compiled, torch.randn(40, 8).double(), loss=loss, maximum=16, verify=False)
    wanted = (2 * outputs[-1] / 0.7).sum(0)
    assert torch.allclose(net[0].bias.grad, wanted, rtol=1e-10)


@pytest.mark.slow
def test_a_last_sample_gets_a_partner_and_single_samples_are_another_graph(counter):
    net, b = net_of(), batch_of(65)
    fn = loss_by(torch.compile(net, backend=counter))
    for size in (65, 16, 8, 4):
        step(fn, b, maximum=size)
    assert counter.frame_count == 1
    step(fn, b, maximum=1)
    assert counter.frame_count == 2


@pytest.mark.slow
def test_training_and_evaluation_are_two_graphs(counter):
    net, b = nn.Sequential(net_of(), nn.Dropout(0.1)), batch_of()
    fn = loss_by(torch.compile(net, backend=counter))
    for training, size in itertools.product((True, False), SIZES):
        net.train(training)
        step(fn, b, maximum=size)
    assert counter.frame_count == 2


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", [False, True])
def test_checkpoints_inside_compiled_code_and_a_compiled_backward_pass_are_exact(
    checkpoints, counter
):
    net, plain, b = net_of(checkpoints=checkpoints), net_of(), batch_of()
    loss_by(plain)(b).backward()
    wanted = gradients(plain)
    fn = loss_by(torch.compile(net, backend=counter))
    with torch._dynamo.config.patch(compiled_autograd=not checkpoints):
        for size in SIZES:
            step(fn, b, maximum=size)
            assert far(gradients(net), wanted) <= 1e-10
    assert counter.frame_count == 1


def test_what_was_computed_before_the_step_keeps_no_mark(counter):
    net, b = net_of(), batch_of()
    for block in net.blocks:
        block.compile(backend=counter)
    offset = torch.zeros(33, 1, dtype=torch.float64)

    def fn(b):
        part = net.blocks[0](offset.expand(33, 6))
        return F.cross_entropy(net(b["x"]), b["y"]) + 0 * part.sum()

    step(fn, b, maximum=33)
    assert vars(offset) == {}
    assert not any(hasattr(p, "_dynamo_weak_dynamic_indices") for p in net.parameters())


def test_nothing_is_compiled_to_look_at_a_step(counter):
    net, b = net_of(), batch_of()
    fn = loss_by(torch.compile(net, backend=counter))
    assert check_split(fn, b).ok
    found = plan(fn, b, "1MiB")
    report = predict_peak(fn, b)
    told = "compiled code is predicted as it is written, and may take more or less"
    assert told in found.reasons
    assert told in report.reasons
    big = batch_of(2000)

    def train(n):
        fn({name: value[:n] for name, value in big.items()}).backward()

    # a budget has to count, so that what runs in it is not compiled
    assert find_batch_size(train, high=2000, budget="256KiB") > 1
    with pytest.raises(SplitMismatchError):
        step(lambda b: fn(b).sqrt(), b, maximum=20)
    assert counter.frame_count == 0


def test_what_mixes_samples_is_refused_in_compiled_code_too(counter):
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    b = batch_of()
    compiled = torch.compile(net, backend=counter)
    with pytest.raises(BatchCoupledError, match="BatchNorm1d"):
        step(loss_by(compiled), b, maximum=20)
    outcomes = []
    for model in (net, compiled):
        net[1].reset_running_stats()
        step(loss_by(model), b, maximum=20, batchnorm="per_chunk")
        outcomes.append([*gradients(net), net[1].running_mean.clone()])
    assert far(*outcomes) <= 1e-10


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


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_a_step_that_compiled_code_calls_predicts_as_any_other(sim, counter):
    net, b = net_of(device=sim.device), batch_of(400, sim.device)
    fn = loss_by(net)

    def train(b):
        return step(fn, b, predict=True).loss

    sim.budget_bytes = sim.allocated_bytes + 40_000
    statistics().reset()
    torch.compile(train, backend=counter)(b)
    assert (statistics().attempts, statistics().ooms) == (1, 0)


@pytest.mark.exhaustive
@pytest.mark.sim_allocator("exact")
@pytest.mark.parametrize("form", ["the model", "blocks in place"])
def test_a_size_that_does_not_fit_is_predicted_and_not_compiled(sim, form, counter):
    net, b = net_of(32, device=sim.device), batch_of(300, sim.device)
    before = sim.allocated_bytes
    loss_by(net)(b).backward()
    wanted, whole_bytes = gradients(net), sim.peak_bytes - before
    graphs, sizes = [], []

    def noted(module, inputs):
        graphs.append(sizes[-1])
        return counter(module, inputs)

    compiled = FORMS[form](net, noted)

    def fn(b):
        sizes.append(len(b["x"]))
        return compiled(b)

    sim.budget_bytes = before + whole_bytes // 3
    statistics().reset()
    result = step(fn, b, predict=True)
    assert statistics().ooms == 0
    # what lists name is brought back after a prediction, so that these are the sizes that ran
    assert graphs == [result.micro_batch]
    assert 20 < result.micro_batch < 110
    assert far(gradients(net), wanted) <= 1e-10


@pytest.mark.exhaustive
@pytest.mark.sim_allocator("exact")
def test_a_compiled_step_that_runs_out_compiles_one_graph_as_well(sim, counter):
    net, b = net_of(32, device=sim.device), batch_of(300, sim.device)
    before = sim.allocated_bytes
    loss_by(net)(b).backward()
    wanted, whole_bytes = gradients(net), sim.peak_bytes - before
    fn = loss_by(torch.compile(net, backend=counter))
    sim.budget_bytes = before + whole_bytes // 3
    result = step(fn, b)
    assert result.attempts > 1
    assert sim.peak_bytes <= sim.budget_bytes
    assert far(gradients(net), wanted) <= 1e-10
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_the_default_compiler_gives_the_gradients_of_the_whole(mode):
    pytest.importorskip("torch._inductor")
    try:
        torch._inductor.cpp_builder.get_cpp_compiler()
    except Exception as error:
        pytest.skip(f"no C++ compiler: {error}")
    net, plain, b = net_of(), net_of(), batch_of()
    loss_by(plain)(b).backward()
    wanted = gradients(plain)
    compiled = torch.compile(net, mode=mode)
    for size in SIZES:
        step(loss_by(compiled), b, maximum=size)
        assert far(gradients(net), wanted) <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("form", ["in place", "wrapped"])
def test_a_step_has_torch_compile_what_it_would_compile_without_one(form):
    def n_compiled(run):
        forget_compiled()
        counter = CompileCounterWithBackend("aot_eager")
        if form == "in place":
            models = [
                nn.Sequential(nn.Linear(4, n), nn.Linear(n, 3)).double() for n in range(2, 14)
            ]
            for model in models:
                model.compile(backend=counter)
        else:
            nets = [Net(n).double() for n in (4, 6)]
            models = [torch.compile(net, backend=counter, fullgraph=True) for net in nets]
        for model in models:
            run(loss_by(model))
        return counter.frame_count

    b = batch_of()
    # torch's own classes, compiled in place: none up to 2.13, as many as its limit allows from 2.14
    without = n_compiled(lambda loss: loss(b).backward())
    assert n_compiled(lambda loss: step(loss, b, maximum=20)) == without


@needs_torch("2.11", "torch.compile after dispatch modes that overlap on two threads")
def test_checks_that_overlap_on_two_threads_let_torch_compile_afterwards():
    begun, over = {"first": Event(), "second": Event()}, Event()
    waits_for = {"first": begun["second"], "second": over}

    def check(name):
        net = nn.Linear(2, 1)

        def fn(x):
            begun[name].set()
            assert waits_for[name].wait(60)
            return net(x).square().mean()

        check_split(fn, torch.ones(4, 2))

    first, second = (Thread(target=check, args=(name,)) for name in begun)
    first.start()
    assert begun["first"].wait(60)
    second.start()
    first.join()
    over.set()
    second.join()
    counter = CompileCounterWithBackend("eager")
    torch.compile(lambda x: x * 3, backend=counter)(torch.ones(2))
    assert counter.frame_count == 1
