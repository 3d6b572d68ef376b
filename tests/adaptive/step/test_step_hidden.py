"""Modules that no search finds are seen when they run: refused where they couple, and undone."""

import contextvars
import operator
import threading
import weakref

import numpy
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tenure import NewDisposeScope
from tenure.adaptive import AdaptiveUsageError, BatchCoupledError, NoBatchsizeCache, step

CONTEXT = contextvars.ContextVar("CONTEXT")


class Holder:
    """Has one attribute."""

    def __init__(self, net):
        self.net = net


def _by_name(net):
    holder = Holder(net)
    return lambda b: getattr(holder, "n" + "et")(b)


def _by_attrgetter(net):
    holder, get = Holder(net), operator.attrgetter("net")
    return lambda b: get(holder)(b)


def _by_context_variable(net):
    CONTEXT.set(net)
    return lambda b: CONTEXT.get()(b)


def _in_array(net):
    array = numpy.empty(1, dtype=object)
    array[0] = net
    return lambda b: array[0](b)


def _by_globals(net):
    space = {"network": net}
    exec("def fn(b):\n    return globals()['net' + 'work'](b)", space)
    return space["fn"]


HIDDEN = {
    "getattr": _by_name,
    "attrgetter": _by_attrgetter,
    "ContextVar": _by_context_variable,
    "object array": _in_array,
    "globals()": _by_globals,
}


def _norm():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)).double()


def _batch(n=8):
    torch.manual_seed(1)
    return torch.randn(n, 4, dtype=torch.float64)


@pytest.mark.parametrize("how", HIDDEN)
def test_batchnorm_that_no_search_finds_is_refused_when_it_runs(how):
    net = _norm()
    run = HIDDEN[how](net)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(BatchCoupledError, match=r"BatchNorm1d, training with the statistics of"):
        step(lambda b: run(b).square().mean(), _batch(), maximum=4)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert net[0].weight.grad is None


@pytest.mark.parametrize("how", HIDDEN)
def test_buffers_of_a_module_that_no_search_finds_are_written_once(how):
    net = _norm()
    run = HIDDEN[how](net)
    n_calls = []

    def fn(b):
        out = run(b)
        n_calls.append(len(b))
        if len(n_calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return out.square().mean()

    result = step(fn, _batch(), batchnorm="per_chunk", cache_type=NoBatchsizeCache)
    assert result.sizes == (4, 4)
    assert net[1].num_batches_tracked == 2


@pytest.mark.parametrize("fails", [False, True])
def test_gradients_of_a_hidden_module_in_a_reentrant_checkpoint_are_those_of_the_whole(fails):
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    run, n_calls = _by_name(net), []

    def fn(b):
        n_calls.append(len(b))
        # in an attempt whose first micro-batch has run backward
        if fails and n_calls[1:] == [4, 4]:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        out = checkpoint(run, b.clone().requires_grad_(), use_reentrant=True)
        return out.square().sum(), out.numel()

    total, count = fn(_batch())
    (total / count).backward()
    wanted = [2 * each.grad for each in net.parameters()]
    result = step(fn, _batch(), maximum=4, verify=not fails, cache_type=NoBatchsizeCache)
    assert (result.attempts > 1) == fails
    torch.testing.assert_close([each.grad for each in net.parameters()], wanted)


def test_a_gradient_hook_of_a_hidden_module_runs_once_where_the_split_is_verified():
    net, seen = nn.Linear(4, 1).double(), []
    run = _by_name(net)
    net.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    step(lambda b: run(b).square().mean(), _batch(), maximum=4, cache_type=NoBatchsizeCache)
    torch.testing.assert_close(seen, [net.weight.grad])


def test_a_hidden_batchnorm_that_refuses_one_sample_is_told_as_what_it_is():
    net = _norm()
    run = _by_name(net)
    with pytest.raises(BatchCoupledError, match=r"BatchNorm1d, training with the statistics"):
        step(lambda b: run(b).square().mean(), _batch(), maximum=1)


def test_what_a_hidden_module_keeps_is_undone_in_both_passes():
    class Counting(nn.Module):
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

    net = Counting().double()
    run = _by_name(net)
    x = _batch()
    torch.cat([net(chunk) for chunk in x.split(4)]).std().backward()
    wanted, later = net.linear.weight.grad, torch.rand(1, generator=net.random)
    net.zero_grad()
    net.n_calls, net.calls = 0, torch.zeros(())
    net.random.manual_seed(3)
    step(run, x, loss=lambda out: out.std(), batchnorm="per_chunk", maximum=4)
    torch.testing.assert_close(net.linear.weight.grad, wanted, rtol=1e-10, atol=1e-12)
    assert (net.n_calls, float(net.calls)) == (2, 2.0)
    assert torch.equal(torch.rand(1, generator=net.random), later)


def test_a_module_that_first_runs_in_a_later_micro_batch_is_refused():
    net, norm = nn.Linear(4, 4).double(), nn.BatchNorm1d(4).double()
    late, n_calls = Holder(norm), []

    def fn(b):
        n_calls.append(len(b))
        out = net(b)
        return (getattr(late, "n" + "et")(out) if len(n_calls) > 1 else out).square().mean()

    with pytest.raises(BatchCoupledError, match="BatchNorm1d"):
        step(fn, _batch(), maximum=4)
    assert net.weight.grad is None
    assert norm.num_batches_tracked == 0


def test_batchnorm_beside_the_modules_that_were_named_is_refused_when_it_runs():
    net, norm = nn.Linear(4, 4).double(), nn.BatchNorm1d(4).double()
    with pytest.raises(BatchCoupledError, match="BatchNorm1d"):
        step(lambda b: norm(net(b)).square().mean(), _batch(), model=net, maximum=4)


def test_modules_that_other_threads_run_belong_to_no_step():
    net, other = nn.Linear(4, 4).double(), _norm()
    run = _by_name(other)

    def fn(b):
        thread = threading.Thread(target=run, args=(_batch(),))
        thread.start()
        thread.join()
        return net(b).square().mean()

    assert step(fn, _batch(), maximum=4, verify=False).sizes == (4, 4)
    assert other[1].num_batches_tracked == 2


def test_modules_that_run_after_a_step_are_not_kept():
    net = nn.Linear(4, 4).double()
    step(lambda b: net(b).square().mean(), _batch(), maximum=4)
    other = nn.Linear(4, 4)
    other(torch.ones(1, 4))
    gone = weakref.ref(other)
    del other
    assert gone() is None


def test_a_compiled_module_that_no_search_finds_is_refused_too():
    net = _norm()
    run = _by_name(torch.compile(net, backend="eager"))
    with pytest.raises(BatchCoupledError, match="BatchNorm1d"):
        step(lambda b: run(b).square().mean(), _batch(), maximum=4)


def test_a_compiled_function_is_searched_for_its_modules():
    net = _norm()
    compiled = torch.compile(lambda b: net(b).square().mean(), backend="eager")
    with pytest.raises(BatchCoupledError, match="BatchNorm1d"):
        step(compiled, _batch(), maximum=4)


def test_seeing_modules_run_costs_compiled_functions_no_graph():
    from torch._dynamo.testing import CompileCounter

    net, counter = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double(), CompileCounter()
    compiled = torch.compile(lambda b: net(b).square().mean(), backend=counter, fullgraph=True)
    with NewDisposeScope():  # a scope is a mode, for which dynamo compiles once more
        x = _batch()
        torch._dynamo.maybe_mark_dynamic(x, 0)
        compiled(x).backward()
    step(compiled, _batch())
    step(compiled, _batch())
    assert counter.frame_count == 1


@pytest.mark.parametrize("maximum", [8, 4])
def test_a_proxy_of_a_model_stands_for_it(maximum):
    net = nn.Linear(4, 4).double()
    net(_batch()).square().mean().backward()
    wanted = net.weight.grad
    net.zero_grad()
    proxy = weakref.proxy(net)
    step(lambda b: proxy(b).square().mean(), _batch(), maximum=maximum)
    torch.testing.assert_close(net.weight.grad, wanted, rtol=1e-10, atol=1e-12)
    step(weakref.proxy(net), _batch(), loss=torch.std, model=proxy, maximum=maximum)
    norm = _norm()
    hidden = weakref.proxy(norm)
    with pytest.raises(BatchCoupledError, match=r"hidden\.1 \(BatchNorm1d"):
        step(lambda b: hidden(b).square().mean(), _batch(), maximum=4)


def test_a_proxy_of_what_is_gone_raises_what_it_raises_elsewhere():
    net = nn.Linear(4, 4).double()
    proxy = weakref.proxy(net)
    del net
    with pytest.raises(ReferenceError, match="no longer exists"):
        step(lambda b: proxy(b).mean(), _batch())
    with pytest.raises(AdaptiveUsageError, match=r"got a NoneType as model="):
        step(lambda b: b.mean(), _batch(), model=proxy)


def test_functional_batchnorm_at_one_sample_is_told_of_the_split():
    net = nn.Linear(4, 4).double()

    def fn(b):
        out = nn.functional.batch_norm(net(b), None, None, training=True)
        return out.square().mean()

    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as caught:
        step(fn, _batch(3), maximum=1)
    assert "step() ran the function on 1 of 3 samples" in caught.value.__notes__[0]
    assert net.weight.grad is None
