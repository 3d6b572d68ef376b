"""Compiled losses that are no one graph: their parts, and the gradients of the whole."""

import pytest
import torch
from torch import nn
from torch._dynamo.convert_frame import register_bytecode_hook
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tenure.adaptive import step

pytestmark = [
    pytest.mark.usefixtures("forgetful", "fresh_compiler"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace"),
]
SIZES = (66, 20, 7)


@pytest.fixture
def counter():
    return CompileCounterWithBackend("aot_eager")


@pytest.fixture(autouse=True)
def _compiles_nothing_of_ours():
    found = []
    hook = register_bytecode_hook(lambda code, new: found.append(code))
    yield
    hook.remove()
    assert [code for code in found if "/tenure/" in code.co_filename] == []
    assert found


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


class Breaks(Whole):
    def forward(self, x):
        x = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return self.last(x)


class Asks(Whole):
    def forward(self, x):
        x = torch.tanh(self.first(x))
        return self.last(x if x.sum().item() < 1e9 else -x)


class Yields(Whole):
    def forward(self, x):
        def layers():
            yield self.first
            yield self.last

        for layer in layers():
            x = layer(torch.tanh(x))
            torch._dynamo.graph_break()
        return x


class Recomputes(Breaks):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Around(Breaks):
    def __init__(self):
        super().__init__()
        self.inner = Breaks()

    def forward(self, x):
        return super().forward(x) + self.inner(x)


def plain_loss(net):
    return lambda b: F.cross_entropy(net(b["x"]), b["y"])


def breaking_loss(net):
    def loss(b):
        out = net(b["x"])
        torch._dynamo.graph_break()
        return F.cross_entropy(out, b["y"])

    return loss


def generated_loss(net):
    def loss(b):
        pairs = zip(b["x"].split(33), b["y"].split(33), strict=True)
        terms = (F.cross_entropy(net(x), y, reduction="sum") for x, y in pairs)
        return sum(terms) / len(b["y"])

    return loss


def batch_of(n=66):
    torch.manual_seed(1)
    return {"x": torch.randn(n, 4, dtype=torch.float64), "y": torch.randint(3, (n,))}


def net_of(kind):
    torch.manual_seed(0)
    return kind().double()


def gradients(net):
    found = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    return found


def wanted_of(net, loss, b):
    loss(b).backward()
    return gradients(net)


def far(net, wanted):
    pairs = zip(gradients(net), wanted, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


CASES = [
    *((kind, plain_loss) for kind in (Breaks, Asks, Yields, Recomputes, Around)),
    (Around, breaking_loss),
    (Breaks, generated_loss),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "loss_of"), CASES)
def test_a_compiled_loss_that_modules_break_gives_the_gradients_of_the_whole(
    kind, loss_of, counter
):
    net, b = net_of(kind), batch_of()
    loss = loss_of(net)
    wanted = wanted_of(net, loss, b)
    compiled = torch.compile(loss, backend=counter)
    for size in SIZES:
        assert step(compiled, b, maximum=size).micro_batch == size
        assert far(net, wanted) <= 1e-10


@pytest.mark.slow
def test_each_part_is_one_graph_for_all_sizes(counter):
    net, b = net_of(Around), batch_of()
    compiled = torch.compile(breaking_loss(net), backend=counter)
    step(compiled, b)
    n_graphs = counter.frame_count
    assert n_graphs > 1
    for size in SIZES:
        step(compiled, b, maximum=size)
    assert counter.frame_count == n_graphs


@pytest.mark.slow
@pytest.mark.parametrize("compiles", ["the module", "the function"])
def test_a_loss_of_outputs_whose_module_breaks(compiles, counter):
    net, b = net_of(Around), batch_of()

    def spread(out):
        return out.std(0).sum()

    wanted = wanted_of(net, lambda b: spread(net(b["x"])), b)
    model = torch.compile(net, backend=counter) if compiles == "the module" else net

    def outputs(b):
        return model(b["x"])

    fn = outputs if compiles == "the module" else torch.compile(outputs, backend=counter)
    step(fn, b, maximum=20, loss=torch.compile(spread, backend=counter))
    assert far(net, wanted) <= 1e-10
