"""Compiled blocks of a paged model: one graph for all of a kind, as many as of a plain model."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

from tenure.paging import PagingError, page
from tests.compiling import forget_compiled

from .models import WIDTH
from .support import about_values, assert_equal, weight_bytes

pytestmark = [
    about_values,
    # dynamo reads the gradient of what one block gives the next, in a plain model too
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

N_BLOCKS = 3


class Block(nn.Module):
    """Has weights of its own, beside its layers', one of them in a list too, and a buffer."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.both = [self.up.weight, self.down.weight]
        self.register_buffer("n_calls", torch.zeros(()))

    def forward(self, x):
        self.n_calls = self.n_calls + 1
        hidden = F.gelu(F.linear(self.norm(x), self.both[0], self.up.bias))
        return x + self.down(hidden) * self.scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(N_BLOCKS)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def in_place(model, backend):
    for block in model.blocks:
        block.compile(backend=backend)


def around(model, backend):
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend=backend)


def build():
    torch.manual_seed(0)
    return Net()


class Counted:
    """What three passes of a model give, and how many graphs they took."""

    def __init__(self, model, x, *, trains):
        forget_compiled()
        self.counter = CompileCounterWithBackend("aot_eager")
        self.model, self.x, self.trains = model.train(trains), x, trains

    def run(self):
        found = []
        with torch.set_grad_enabled(self.trains):
            for _ in range(3):
                output = self.model(self.x)
                found.append(output.detach().cpu())
                if self.trains:
                    self.model.zero_grad()
                    output.sum().backward()
                    found += [p.grad.cpu().clone() for p in self.model.parameters()]
        found += [each.cpu().clone() for each in self.model.state_dict().values()]
        return found, self.counter.frame_count, self.counter.op_count


@pytest.fixture
def plain(sim):
    """What a model that is whole on the device gives, and its graphs."""

    def run(compiles, *, trains):
        # in place: what a list has beside is not moved
        model = build()
        for block in model.blocks:
            block.to(sim.device)
            block.both = [block.up.weight, block.down.weight]
        counted = Counted(model.to(sim.device), x_of(sim.device), trains=trains)
        compiles(model, counted.counter)
        return counted.run()

    return run


def x_of(device):
    torch.manual_seed(1)
    return torch.randn(4, WIDTH).to(device)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiles", "is_first", "trains"),
    [(in_place, True, False), (around, True, False), (in_place, False, True)],
    ids=["in place", "around", "while paged, trained"],
)
def test_blocks_take_as_many_graphs_as_those_of_a_plain_model(
    sim, plain, compiles, is_first, trains
):
    values, n_graphs, n_ops = plain(compiles, trains=trains)
    model = build()
    counted = Counted(model, x_of(sim.device), trains=trains)
    if is_first:
        compiles(model, counted.counter)
    budget = int(weight_bytes(model) * 0.8)
    with page(model, sim.device, budget=budget, training=trains) as handle:
        assert handle.plan.ring_bytes
        if not is_first:
            compiles(model, counted.counter)
        found, n_found, n_found_ops = counted.run()
        # in a backward pass, one of a plain model as well: the ring has no room for two blocks
        assert handle.report().faults <= trains
    assert_equal(found, values)
    assert (n_found, n_found_ops) == (n_graphs, n_ops)


class Whole(Net):
    # dynamo of torch 2.10 never compiles a function that it skipped once, as other tests make it
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_a_whole_model_that_is_compiled_needs_room_for_all_of_it(sim, plain):
    torch.manual_seed(0)
    model = Whole()
    expected, *_ = plain(in_place, trains=True)
    counted = Counted(model, x_of(sim.device), trains=True)
    model.compile(backend=counted.counter)
    with pytest.raises(PagingError, match=r"of its weights are needed at once") as caught:
        page(model, sim.device, budget=int(weight_bytes(model) * 0.8), training=True)
    with page(model, sim.device, budget=caught.value.minimum_bytes, training=True):
        found, n_graphs, _ = counted.run()
    assert_equal(found, expected)
    assert n_graphs == 1


@pytest.mark.filterwarnings("ignore:Dynamo does not know how:UserWarning")  # of graph breaks
def test_a_whole_model_that_is_compiled_while_it_is_paged_names_the_budget(tmp_path):
    forget_compiled()
    model, x = build().eval(), x_of("cpu")
    with torch.no_grad(), page(model, "cpu", 1, budget="40KiB", host=tmp_path):
        expected = model(x)
        model.compile(backend="eager")
        with pytest.raises(RuntimeError, match=r"has no room on cpu.*allow a budget of"):
            model(x)
        model._compiled_call_impl = None
        assert torch.equal(model(x), expected)
