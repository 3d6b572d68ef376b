"""What a step takes back when it begins again, and what that costs where nothing is written."""

import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from tenure import NewDisposeScope, dispose
from tenure.adaptive import NoBatchsizeCache, memory_budget, step

from ..attempt.failures import out_of_memory_once
from .step_cases import OwnBatchNorm, samples, squares


def retried(net, write=lambda b: None, **options):
    """A step whose first attempt fails at its end, and whose second one runs two micro-batches."""
    fail = out_of_memory_once()

    def fn(batch):
        write(batch)
        loss = net(batch).square().mean()
        fail()
        return loss

    result = step(fn, samples(8), cache_type=NoBatchsizeCache, **options)
    assert result.sizes == (4, 4)


class Holder(nn.Module):
    """Holds something, and runs another module."""

    def __init__(self, held):
        super().__init__()
        self.net = nn.Linear(4, 1).double()
        self.held = held

    def forward(self, x):
        return self.net(x)


class Table(Holder):
    """Has a buffer that may be large beside all else, and only reads it."""

    def __init__(self, n):
        super().__init__(None)
        self.register_buffer("table", torch.ones(n))

    def forward(self, x):
        return self.net(x) * self.table[:1]


def test_what_hooks_keep_on_layers_of_torch_is_taken_back():
    layer = nn.Linear(4, 3).double()
    layer.n, layer.total = 0, torch.zeros(())

    def count(layer, inputs, outputs):
        layer.n += len(outputs)
        layer.total += len(outputs)

    layer.register_forward_hook(count)
    retried(layer)
    assert (layer.n, float(layer.total)) == (8, 8.0)


class Growing(nn.Module):
    """Makes a layer in its first call."""

    def forward(self, x):
        if not hasattr(self, "layer"):
            self.layer = nn.Linear(x.shape[1], 3).double()
        return self.layer(x)


class Replacing(nn.Module):
    """Puts a layer and a parameter in place of what stands for them in its first call."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Identity()
        self.register_parameter("bias", None)

    def forward(self, x):
        if self.bias is None:
            self.layer = nn.Sequential(self.layer, nn.Linear(4, 3).double())
            self.bias = nn.Parameter(torch.rand(3).double())
        return self.layer(x) + self.bias


class Normalizing(nn.Module):
    """Parametrizes its layer in its first call, which a flag or the layer tells."""

    def __init__(self, apply, has_flag=True):
        super().__init__()
        self.layer, self.apply_to = nn.Linear(4, 3).double(), apply
        self.is_ready = False if has_flag else None

    def forward(self, x):
        if not (parametrize.is_parametrized(self.layer) or self.is_ready):
            self.apply_to(self.layer)
            if self.is_ready is not None:
                self.is_ready = True
        return self.layer(x)


@pytest.mark.parametrize(
    "make",
    [
        Growing,
        Replacing,
        lambda: nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d().eval()).double(),
        lambda: Normalizing(weight_norm),
        lambda: Normalizing(weight_norm, has_flag=False),
        lambda: Normalizing(nn.utils.weight_norm),
    ],
    ids=["made", "replaced", "lazy", "parametrized", "parametrized layer", "old weight norm"],
)
@pytest.mark.parametrize("fails", [False, True], ids=["verification", "failed attempt"])
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_layers_of_a_first_call_are_those_that_they_are_without_step(make, fails):
    found = []
    for is_split in (False, True):
        torch.manual_seed(0)
        net = make()
        if is_split and fails:
            retried(net)
        else:
            maximum = 4 if is_split else 8
            step(squares(net), samples(8), maximum=maximum, cache_type=NoBatchsizeCache)
        gradients = [p.grad for p in net.parameters()]
        found.append((net.state_dict(), gradients, torch.get_rng_state()))
    torch.testing.assert_close(found[1], found[0])


def test_a_layer_that_a_function_keeps_itself_has_the_weights_that_it_has_without_step():
    found = []
    for maximum in (8, 4):
        torch.manual_seed(0)
        made = []

        def fn(batch, made=made):
            if not made:
                made.append(nn.Linear(4, 3).double())
            return squares(made[0])(batch)

        step(fn, torch.ones(8, 4).double(), maximum=maximum, cache_type=NoBatchsizeCache)
        found.append(made[0].state_dict())
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


class Flagged(Growing):
    """Remembers by an attribute that it has made its layer."""

    is_made = False

    def forward(self, x):
        if not self.is_made:
            self.layer, self.is_made = nn.Linear(x.shape[1], 3).double(), True
        return self.layer(x)


@pytest.mark.parametrize("make", [Growing, Flagged])
def test_a_layer_that_the_first_pass_has_made_is_that_of_the_second_one(make):
    """Whose first chunk has no weight."""
    net, x = make(), samples(8)
    x[:4, 0] = 7
    options = {"weight": lambda b: float(b[0, 0] != 7), "then": torch.sqrt, "verify": False}
    loss = step(squares(net), x, maximum=4, cache_type=NoBatchsizeCache, **options).loss
    given = [p.grad for p in net.parameters()]
    wanted = squares(net)(x[4:]).sqrt()
    torch.testing.assert_close(loss, wanted.detach())
    torch.testing.assert_close(given, [*torch.autograd.grad(wanted, [*net.parameters()])])


def test_how_modules_are_set_is_as_before_when_a_failed_attempt_begins_again():
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)).double()
    weight, seen, fail = net[0].weight, [], out_of_memory_once()

    def fn(batch):
        seen.append((net.training, weight.requires_grad, len(net._forward_hooks)))
        net.eval()
        weight.requires_grad_(False)
        handle = net.register_forward_hook(lambda *_: None)
        loss = net(batch).square().mean()
        fail()
        handle.remove()
        weight.requires_grad_(True)
        net.train()
        return loss

    step(fn, samples(8), verify=False, cache_type=NoBatchsizeCache)
    assert seen == [(True, True, 0)] * len(seen)
    assert len(seen) > 2


def test_a_module_may_hold_what_is_gone_or_disposed():
    items = {"gone soon"}
    holder = Holder(weakref.proxy(items))
    del items
    retried(holder)

    class Showing(Table):
        def forward(self, x):
            self.table = torch.ones(4, dtype=x.dtype)
            self.held = self.net(x * self.table)
            return self.held

    showing = Showing(4)
    for _ in range(2):
        with NewDisposeScope():
            step(squares(showing), samples(8), maximum=4, batchnorm="per_chunk")
    dispose(showing.table)
    retried(showing, batchnorm="per_chunk")
    assert showing.table.tolist() == [1.0] * 4


def test_buffers_that_an_operation_writes_unseen_are_taken_back_in_both_passes():
    x = samples(8)
    torch.manual_seed(0)
    wanted = OwnBatchNorm().double()
    for n_steps in (1, 2):  # in the second one the buffers are known to be written
        for chunk in x.split(4):
            wanted(chunk)
        torch.manual_seed(0)
        net = OwnBatchNorm().double()
        for _ in range(n_steps):
            step(net, x, loss=lambda out: out.std(), batchnorm="per_chunk", maximum=4)
        torch.testing.assert_close(net.mean, wanted.mean)
        torch.testing.assert_close(net.var, wanted.var)


@pytest.mark.parametrize("maximum", [8, 4])
def test_a_large_buffer_that_nobody_writes_is_not_copied(maximum):
    net = Table(1 << 18)
    address = net.table.data_ptr()
    with memory_budget("256KiB") as budget:
        result = step(squares(net), samples(8), maximum=maximum)
    assert result.attempts == 1
    assert budget.peak_bytes < 1 << 16
    assert net.table.data_ptr() == address


def test_a_buffer_that_was_written_stays_where_it_is():
    net = Table(4).double()
    array, address = net.table.numpy(), net.table.data_ptr()
    for n_steps in (1, 2):  # in the second one it is known to be written
        retried(net, lambda b: net.table.add_(1), batchnorm="per_chunk", verify=False)
        assert net.table.data_ptr() == address
        assert array.tolist() == net.table.tolist() == [1.0 + 2 * n_steps] * 4


class Observer(nn.Module):
    """Resizes its buffers in the first call, as fake quantization by channels does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("least", torch.empty(0))
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        if not self.least.numel():
            self.least.resize_(3).fill_(2.0)
            self.scale.resize_(3).fill_(4.0)
        return x * self.scale


@pytest.mark.parametrize("fails", [False, True])
def test_buffers_that_a_first_call_resizes_are_those_that_they_are_without_step(fails):
    net = nn.Sequential(nn.Linear(4, 3), Observer())
    failures = [torch.OutOfMemoryError("CUDA out of memory.")] * fails

    def fn(x):
        loss = net(x).square().mean()
        if failures:
            assert net[1].least.shape == (3,)
            raise failures.pop()
        return loss

    step(fn, torch.ones(8, 4), batchnorm="per_chunk", cache_type=NoBatchsizeCache)
    assert [net[1].least.tolist(), net[1].scale.tolist()] == [[2.0] * 3, [4.0] * 3]
