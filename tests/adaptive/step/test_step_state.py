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


class Counting(nn.Module):
    """Writes into all that it keeps."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.seen = torch.zeros(())
        self.by_name = {"train": {"n": 0, "sizes": [], "sum": torch.zeros(())}}
        self.recent = deque(maxlen=3)
        self.shapes = set()
        self.pair = (torch.zeros(()), {})

    def forward(self, x):
        self.seen += len(x)
        inner = self.by_name["train"]
        inner["n"] += len(x)
        inner["sizes"].append(len(x))
        inner["sum"].add_(len(x))
        self.recent.append(len(x))
        self.shapes.add(x.shape)
        self.pair[0].add_(len(x))
        self.pair[1][len(x)] = True
        return self.linear(x)


def test_tensors_and_containers_in_attributes_are_taken_back():
    net = Counting().double()
    seen, inner = net.seen, net.by_name["train"]
    fn = failing_once(lambda b: net(b).square().mean())
    step(fn, samples(8), cache_type=NoBatchsizeCache)
    assert (float(net.seen), float(net.pair[0]), net.pair[1]) == (8.0, 8.0, {4: True})
    assert (inner["n"], inner["sizes"], float(inner["sum"])) == (8, [4, 4], 8.0)
    assert (list(net.recent), net.recent.maxlen) == ([4, 4], 3)
    assert net.shapes == {torch.Size([4, 4])}
    assert (net.seen is seen, net.by_name["train"] is inner) == (True, True)


def test_what_hooks_keep_on_layers_of_torch_is_taken_back():
    layer = nn.Linear(4, 3).double()
    layer.n, layer.lengths, layer.total, layer.made = 0, [], torch.zeros(()), torch.zeros(())

    def count(layer, inputs, outputs):
        layer.n += len(outputs)
        layer.lengths.append(len(outputs))
        layer.total += len(outputs)
        layer.made = layer.made + len(outputs)

    layer.register_forward_hook(count)
    fn = failing_once(lambda b: layer(b).square().mean())
    step(fn, samples(16), cache_type=NoBatchsizeCache)
    assert (layer.n, layer.lengths) == (16, [8, 8])
    assert (float(layer.total), float(layer.made)) == (16.0, 16.0)


def test_a_lazy_layer_that_a_failed_attempt_has_made_is_used_by_the_next():
    net = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()).eval().double()
    step(failing_once(lambda b: net(b).square().mean()), samples(8), cache_type=NoBatchsizeCache)
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


def test_containers_within_themselves_are_taken_back():
    net = Counting().double()
    net.loop = loop = []
    loop.append(loop)

    def fn(b):
        net.loop.append(len(b))
        return net(b).square().mean()

    step(failing_once(fn), samples(8), cache_type=NoBatchsizeCache)
    assert loop[1:] == [4, 4]
    assert loop[0] is loop


class Named(OrderedDict):
    def __init__(self, name):
        super().__init__()
        self.name = name


class OfLists(defaultdict):
    def __init__(self):
        super().__init__(list)


class Last(deque):
    def __init__(self, config):
        super().__init__(maxlen=config["n"])


class Frozen(dict):
    def clear(self):
        raise TypeError("not to be cleared")

    update = copy = items = clear


class Several(list):
    def copy(self):
        raise TypeError("not to be copied")

    clear = extend = copy


class Uncopied(set):
    def copy(self):
        raise TypeError("not to be copied")

    clear = update = copy


def put(container, n):
    if isinstance(container, dict):
        container[n] = n
    elif isinstance(container, set):
        container.add(n)
    else:
        container.append(n)


@pytest.mark.parametrize(
    "make",
    [lambda: Named("a"), OfLists, lambda: Last({"n": 9}), Frozen, Several, Uncopied],
    ids=["OrderedDict", "defaultdict", "deque", "dict", "list", "set"],
)
def test_containers_of_classes_of_the_users_are_taken_back(make):
    net = nn.Linear(4, 1).double()
    holder = Holder(net, make())

    def fn(b):
        put(holder.held, len(b))
        return holder(b).square().mean()

    held = holder.held
    step(failing_once(fn), samples(8), cache_type=NoBatchsizeCache, verify=False)
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


def test_a_weak_proxy_of_what_is_gone_is_left_alone():
    named = Named("gone soon")
    holder = Holder(nn.Linear(4, 1).double(), weakref.proxy(named))
    del named
    fn = failing_once(lambda b: holder(b).square().mean())
    assert step(fn, samples(8), cache_type=NoBatchsizeCache).sizes == (4, 4)


def test_a_module_may_hold_what_the_scope_of_the_last_step_has_disposed():
    class Showing(Holder):
        def forward(self, x):
            y = self.net(x)
            self.held = y.detach()
            return y

    showing = Showing(nn.Linear(4, 1).double(), None)
    for _ in range(2):
        with NewDisposeScope():
            step(lambda b: showing(b).square().mean(), samples(8), maximum=4)
    fn = failing_once(lambda b: showing(b).square().mean())
    assert step(fn, samples(8), cache_type=NoBatchsizeCache).sizes == (4, 4)


def test_a_module_may_hold_a_buffer_that_was_disposed_and_is_made_again():
    class Masking(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 1)
            self.register_buffer("mask", torch.ones(4))

        def forward(self, x):
            self.mask = torch.ones(4, dtype=x.dtype)
            return self.net(x * self.mask)

    masking = Masking().double()
    dispose(masking.mask)
    fn = failing_once(lambda b: masking(b).square().mean())
    assert step(fn, samples(8), cache_type=NoBatchsizeCache).sizes == (4, 4)
    assert masking.mask.tolist() == [1.0] * 4


def test_buffers_that_an_operation_writes_unseen_are_taken_back_in_both_passes():
    def trained(options, *, twice):
        torch.manual_seed(0)
        net = OwnBatchNorm().double()
        fn = lambda b: net(b)  # noqa: E731
        for _ in range(2 if twice else 1):  # the second time the buffers are known to be written
            step(fn, x, loss=lambda out: out.std(), batchnorm="per_chunk", **options)
        return net

    x = samples(8)
    torch.manual_seed(0)
    wanted = OwnBatchNorm().double()
    for i in range(2):
        for chunk in x.split(4):
            wanted(chunk)
        got = trained({"maximum": 4}, twice=i == 1)
        torch.testing.assert_close(got.mean, wanted.mean)
        torch.testing.assert_close(got.var, wanted.var)


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


def test_a_buffer_that_was_written_stays_where_it_is_from_then_on():
    net = Counting().double()
    net.register_buffer("total", torch.zeros(4))

    def fn(b):
        net.total.add_(len(b))
        return net(b).square().mean()

    step(fn, samples(8))
    address = net.total.data_ptr()
    step(fn, samples(8))
    step(failing_once(fn), samples(8), batchnorm="per_chunk", cache_type=NoBatchsizeCache)
    assert net.total.data_ptr() == address
    assert net.total.tolist() == [24.0] * 4


def test_memory_that_others_have_the_address_of_is_not_moved():
    net = Table(4)
    array = net.table.numpy()

    def fn(b):
        net.table.add_(1)
        return net(b).square().mean()

    step(failing_once(fn), torch.randn(8, 4), batchnorm="per_chunk", cache_type=NoBatchsizeCache)
    assert array.tolist() == net.table.tolist() == [3.0] * 4


@pytest.mark.simdevice
def test_whether_buffers_were_written_is_asked_once_for_all(sim, monkeypatch):
    class Tables(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            for i in range(5):
                self.register_buffer(f"table{i}", torch.ones(4))

        def forward(self, x):
            return self.linear(x) * self.table0 * self.table4

    net, asked = Tables().to(sim.device), []
    real = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: asked.append(t.shape) or real(t))
    monkeypatch.setattr(torch, "allclose", None)
    x = torch.randn(8, 4).to(sim.device)
    step(lambda b: net(b).square().mean(), x, maximum=4, verify=False)
    assert asked == [(5,)]
