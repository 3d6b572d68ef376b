"""Modules that no search finds are seen when they run: refused where they couple, and undone."""

import threading
import weakref

import numpy
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tenure.adaptive import BatchCoupledError, NoBatchsizeCache, step

from ..unchanged import unchanged
from .step_cases import compare, gradients, samples, squares, wanted_of, worst_error


class Holder:
    """Has one attribute."""

    def __init__(self, net):
        self.net = net


def _by_name(net):
    holder = Holder(net)
    return lambda b: getattr(holder, "n" + "et")(b)


def _in_array(net):
    array = numpy.empty(1, dtype=object)
    array[0] = net
    return lambda b: array[0](b)


def _compiled(net):
    return _by_name(torch.compile(net, backend="eager"))


def _norm():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)).double()


@pytest.mark.parametrize(
    ("hide", "maximum"), [(_by_name, 4), (_in_array, 4), (_by_name, 1), (_compiled, 4)]
)
def test_batchnorm_that_no_search_finds_is_refused_when_it_runs(hide, maximum):
    net = _norm()
    run = hide(net)
    x = samples(8)
    refused = pytest.raises(BatchCoupledError, match="BatchNorm1d, training with the statistics of")
    with unchanged(net), refused:
        step(squares(run), x, maximum=maximum)


def test_buffers_of_a_module_that_no_search_finds_are_written_once():
    net, n_calls = _norm(), []
    run = _by_name(net)

    def fn(b):
        out = run(b)
        n_calls.append(len(b))
        if len(n_calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return out.square().mean()

    result = step(fn, samples(8), batchnorm="per_chunk", cache_type=NoBatchsizeCache)
    assert result.sizes == (4, 4)
    assert net[1].num_batches_tracked == 2


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_gradients_of_a_hidden_module_in_a_checkpoint_are_those_of_the_whole(fails, reentrant):
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    run, n_calls, seen, x = _by_name(net), [], [], samples(8)

    def fn(b):
        n_calls.append(len(b))
        # in an attempt whose first micro-batch has run backward
        if fails and n_calls[1:] == [4, 4]:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        out = checkpoint(run, b.clone().requires_grad_(), use_reentrant=reentrant)
        return out.square().sum(), out.numel()

    total, count = fn(x)
    (total / count).backward()
    wanted = [2 * each.grad for each in net.parameters()]
    net[0].weight.register_hook(seen.append)
    result = step(fn, x, maximum=4, verify=not fails, cache_type=NoBatchsizeCache)
    assert (result.attempts > 1) == fails
    torch.testing.assert_close([each.grad for each in net.parameters()], wanted)
    assert len(seen) == 1


class Counting(nn.Module):
    """Counts, writes a buffer, and draws by a generator of its own."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.n_calls = 0
        self.register_buffer("calls", torch.zeros(()))
        self.random = torch.Generator().manual_seed(3)

    def forward(self, x):
        self.n_calls += 1
        self.calls = self.calls + 1
        out = self.linear(x)
        return out * torch.rand(out.shape, generator=self.random, dtype=out.dtype)


def _two_terms(out):
    return {"sum": (out.sum(), len(out)), "square": (out.square().sum(), out.numel())}


@pytest.mark.parametrize("way", ["outputs", "terms"])
def test_what_a_hidden_module_keeps_is_undone_in_both_passes(way):
    net, x = Counting().double(), samples(8)
    run = _by_name(net)
    out = torch.cat([net(chunk) for chunk in x.split(4)])
    wanted = wanted_of(net, out.std() if way == "outputs" else out.sum() / 8 + out.square().mean())
    later = torch.rand(1, generator=net.random)
    net.n_calls, net.calls = 0, torch.zeros(())
    net.random.manual_seed(3)
    fn, options = {
        "outputs": (run, {"loss": lambda out: out.std()}),
        # beside the one that is named
        "terms": (lambda b: _two_terms(run(b)), {"model": nn.Linear(1, 1)}),
    }[way]
    step(fn, x, batchnorm="per_chunk", maximum=4, **options)
    assert worst_error(gradients(net), wanted) < 1e-10
    assert (net.n_calls, float(net.calls)) == (2, 2.0)
    assert torch.equal(torch.rand(1, generator=net.random), later)


def test_a_module_that_first_runs_in_a_later_micro_batch_is_refused():
    net, norm = nn.Linear(4, 4).double(), nn.BatchNorm1d(4).double()
    run, n_calls = _by_name(norm), []

    def fn(b):
        n_calls.append(len(b))
        return (run(net(b)) if len(n_calls) > 1 else net(b)).square().mean()

    with pytest.raises(BatchCoupledError, match="BatchNorm1d"):
        step(fn, samples(8), maximum=4)
    assert net.weight.grad is None
    assert norm.num_batches_tracked == 0
    with pytest.raises(BatchCoupledError, match="BatchNorm1d"):
        step(lambda b: norm(net(b)).square().mean(), samples(8), model=net, maximum=4)


def test_modules_that_other_threads_run_belong_to_no_step():
    net, other = nn.Linear(4, 4).double(), _norm()
    run = _by_name(other)

    def fn(b):
        thread = threading.Thread(target=run, args=(samples(8),))
        thread.start()
        thread.join()
        return net(b).square().mean()

    assert step(fn, samples(8), maximum=4, verify=False).sizes == (4, 4)
    assert other[1].num_batches_tracked == 2


def test_a_proxy_of_a_model_stands_for_it():
    net, x = nn.Linear(4, 4).double(), samples(8)
    proxy = weakref.proxy(net)
    compare(net, squares(net)(x), lambda b: proxy(b).square().mean(), x, maximum=4, model=proxy)
    norm = _norm()
    hidden = weakref.proxy(norm)
    with pytest.raises(BatchCoupledError, match=r"hidden\.1 \(BatchNorm1d"):
        step(lambda b: hidden(b).square().mean(), x, maximum=4)
