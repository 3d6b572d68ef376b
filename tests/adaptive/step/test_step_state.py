"""What a step takes back when it begins again, and what that costs where nothing is written."""

import weakref
from collections import OrderedDict, defaultdict, deque

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from tenure import NewDisposeScope, dispose
from tenure.adaptive import NoBatchsizeCache, memory_budget, step

from .step_cases import OwnBatchNorm, samples


def failing_once(fn):
    """A function that runs out of memory at the end of its first call."""
    n_calls = []

    def failing(batch):
        loss = fn(batch)
        n_calls.append(1)
        if len(n_calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return loss

    return failing


def retried(net, write=lambda b: None, **options):
    """A step whose first attempt fails, and whose second one runs two micro-batches."""

    def fn(b):
        write(b)
        return net(b).square().mean()

    return step(failing_once(fn), samples(8), cache_type=NoBatchsizeCache, **options)


class Counting(nn.Module):
    """Writes into all that it keeps."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.n = 0
        self.seen = torch.zeros(())
        self.made = torch.zeros(())
        self.by_name = {"train": {"sizes": [], "sum": torch.zeros(())}}
        self.recent = deque(maxlen=3)
        self.shapes = set()
        self.pair = (torch.zeros(()), {})
        self.loop = []
        self.loop.append(self.loop)

    def forward(self, x):
        self.n += len(x)
        self.seen += len(x)
        self.made = self.made + len(x)
        inner = self.by_name["train"]
        inner["sizes"].append(len(x))
        inner["sum"].add_(len(x))
        self.recent.append(len(x))
        self.shapes.add(x.shape)
        self.pair[0].add_(len(x))
        self.pair[1][len(x)] = True
        self.loop.append(len(x))
        return self.linear(x)


def test_tensors_and_containers_in_attributes_are_taken_back():
    net = Counting().double()
    seen, inner, loop = net.seen, net.by_name["train"], net.loop
    retried(net)
    assert (net.n, float(net.seen), float(net.made)) == (8, 8.0, 8.0)
    assert (float(net.pair[0]), net.pair[1]) == (8.0, {4: True})
    assert (inner["sizes"], float(inner["sum"])) == ([4, 4], 8.0)
    assert (list(net.recent), net.recent.maxlen) == ([4, 4], 3)
    assert net.shapes == {torch.Size([4, 4])}
    assert (net.seen is seen, net.by_name["train"] is inner, loop[0] is loop) == (True,) * 3
    assert loop[1:] == [4, 4]


def test_what_hooks_keep_on_layers_of_torch_is_taken_back():
    layer = nn.Linear(4, 3).double()
    layer.n, layer.total = 0, torch.zeros(())

    def count(layer, inputs, outputs):
        layer.n += len(outputs)
        layer.total += len(outputs)

    layer.register_forward_hook(count)
    retried(layer)
    assert (layer.n, float(layer.total)) == (8, 8.0)


def test_a_lazy_layer_that_a_failed_attempt_has_made_is_used_by_the_next():
    net = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()).eval().double()
    retried(net)
    assert (type(net[0]), net[0].in_features, net[1].num_features) == (nn.Linear, 4, 3)
    assert net[0].weight.grad.shape == (3, 4)


def test_how_modules_are_set_is_as_before_when_a_failed_attempt_begins_again():
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)).double()
    seen = []

    def fn(batch):
        weight = net[0].weight
        seen.append((net.training, weight.requires_grad, len(net._forward_hooks)))
        net.eval()
        weight.requires_grad_(False)
        handle = net.register_forward_hook(lambda *_: None)
        loss = net(batch).square().mean()
        if len(seen) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        handle.remove()
        weight.requires_grad_(True)
        net.train()
        return loss

    step(fn, samples(8), verify=False, cache_type=NoBatchsizeCache)
    assert seen == [(True, True, 0)] * len(seen)
    assert len(seen) > 2


class Named(OrderedDict):
    def __init__(self, name):
        super().__init__()
        self.name = name


class OfLists(defaultdict):
    def __init__(self):
        super().__init__(list)


def put(container, n):
    if isinstance(container, dict):
        container[n] = n
    else:
        container.append(n)


@pytest.mark.parametrize("make", [lambda: Named("a"), OfLists])
def test_containers_of_classes_of_the_users_are_taken_back(make):
    holder = Holder(nn.Linear(4, 1).double(), make())
    held = holder.held
    retried(holder, lambda b: put(holder.held, len(b)), verify=False)
    assert holder.held is held
    assert set(held) == {4}  # and no 8, of the attempt that failed


class Holder(nn.Module):
    """Holds something, and runs another module."""

    def __init__(self, net, held):
        super().__init__()
        self.net = net
        self.held = held

    def forward(self, x):
        return self.net(x)


def test_a_container_that_keeps_its_items_as_attributes_too_gets_both_back():
    before = torch.zeros(3)
    holder = Holder(nn.Linear(4, 1).double(), BaseModelOutput(last_hidden_state=before))

    def fn(b):
        holder.held["last_hidden_state"] = torch.ones(len(b))
        raise ValueError("of the user")

    with pytest.raises(ValueError, match="of the user"):
        step(fn, samples(8), model=holder)
    assert holder.held["last_hidden_state"] is before
    assert holder.held.last_hidden_state is before


class Showing(Holder):
    """Keeps its last output, and a mask that it makes again."""

    def __init__(self, net):
        super().__init__(net, None)
        self.register_buffer("mask", torch.ones(4))

    def forward(self, x):
        self.mask = torch.ones(4, dtype=x.dtype)
        out = self.net(x * self.mask)
        self.held = out.detach()
        return out


def test_a_module_may_hold_what_is_gone_or_disposed():
    named = Named("gone soon")
    holder = Holder(nn.Linear(4, 1).double(), weakref.proxy(named))
    del named
    assert retried(holder).sizes == (4, 4)
    showing = Showing(nn.Linear(4, 1)).double()
    for _ in range(2):
        with NewDisposeScope():
            step(lambda b: showing(b).square().mean(), samples(8), maximum=4)
    dispose(showing.mask)
    assert retried(showing).sizes == (4, 4)
    assert showing.mask.tolist() == [1.0] * 4


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


class Table(nn.Module):
    """Has a buffer that is large beside all else, and only read."""

    def __init__(self, n):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("table", torch.ones(n))

    def forward(self, x):
        return self.linear(x) * self.table[:3]


@pytest.mark.parametrize("maximum", [8, 4])
def test_a_large_buffer_that_nobody_writes_is_not_copied(maximum):
    net, x = Table(1 << 18), torch.randn(8, 4)
    address = net.table.data_ptr()
    with memory_budget("256KiB") as budget:
        result = step(lambda b: net(b).square().mean(), x, maximum=maximum)
    assert result.attempts == 1
    assert budget.peak_bytes < 1 << 16
    assert net.table.data_ptr() == address


def test_a_buffer_that_was_written_stays_where_it_is():
    net = Table(4).double()
    array, address = net.table.numpy(), net.table.data_ptr()
    for n_steps in (1, 2):  # in the second one it is known to be written
        retried(net, lambda b: net.table.add_(1), batchnorm="per_chunk")
        assert net.table.data_ptr() == address
        assert array.tolist() == net.table.tolist() == [1.0 + 2 * n_steps] * 4
