"""What a step has to find to be exact: modules of one name, generators, unversioned buffers."""

from collections.abc import MutableMapping

import pytest
import torch
from torch import nn

from tenure.adaptive import AdaptiveUsageError, BatchCoupledError, step
from tests.programs import run_program

from .step_cases import OwnBatchNorm


class Wrapper:
    def __init__(self, net):
        self.net = net

    def __call__(self, x):
        return self.net(x)


def batch(n=8):
    torch.manual_seed(1)
    return torch.randn(n, 4, dtype=torch.float64)


@pytest.mark.parametrize("is_first", [True, False])
def test_of_two_modules_of_one_name_neither_is_overlooked(is_first):
    coupled = Wrapper(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double())
    plain = Wrapper(nn.Linear(4, 4).double())
    p, q = (coupled, plain) if is_first else (plain, coupled)
    with pytest.raises(BatchCoupledError, match="BatchNorm1d"):
        step(lambda x: p(x).mean() + q(x).mean(), batch(), maximum=4)


def test_a_buffer_that_is_written_without_a_version_couples_the_batch():
    own = OwnBatchNorm().double()
    with pytest.raises(BatchCoupledError, match=r"updates its buffer 'mean'"):
        step(lambda x: own(x).square().mean(), batch(), maximum=4)
    assert torch.equal(own.mean, torch.zeros(4, dtype=torch.float64))


def test_buffers_of_modules_that_were_not_named_are_updated_once():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls = self.calls + 1
            return x

    net, counter = nn.Linear(4, 3).double(), Counter()
    step(lambda x: counter(net(x)), batch(), loss=lambda out: out.std(), model=net, maximum=4)
    assert counter.calls == 2


@pytest.mark.slow
def test_random_numbers_of_numpy_are_noted_before_it_is_asked_for_the_first():
    program = """
import sys, torch, numpy
from tenure.adaptive import step
assert "numpy.random" not in sys.modules or numpy.random.seed(0) is None
drawn = []
net = torch.nn.Linear(1, 1)
def fn(x):
    drawn.append(float(numpy.random.rand()))
    return net(x)
step(fn, torch.ones(4, 1), loss=lambda out: out.sum(), maximum=2, verify=False)
print(drawn[:2] == drawn[2:], len(drawn))
"""
    done = run_program(program, has_tenure=False)
    assert (done.stdout, done.stderr) == ("True 4\n", "")


@pytest.mark.slow
def test_a_step_that_draws_nothing_of_numpy_does_not_load_its_random_numbers():
    program = """
import sys, torch, numpy
from tenure.adaptive import step
before = "numpy.random" in sys.modules
net = torch.nn.Linear(1, 1)
step(lambda x: net(x).mean(), torch.ones(4, 1))
print(before == ("numpy.random" in sys.modules))
"""
    done = run_program(program, has_tenure=False)
    assert (done.stdout, done.stderr) == ("True\n", "")


class Shared(MutableMapping):
    """A mapping whose copies share what they hold."""

    def __init__(self, **items):
        self.items_ = items

    def __getitem__(self, key):
        return self.items_[key]

    def __setitem__(self, key, item):
        self.items_[key] = item

    def __delitem__(self, key):
        del self.items_[key]

    def __iter__(self):
        return iter(self.items_)

    def __len__(self):
        return len(self.items_)


def test_a_mapping_that_cannot_be_copied_is_refused_and_left_as_it_was():
    net, x = nn.Linear(4, 3).double(), batch()
    given = Shared(x=x)
    with pytest.raises(AdaptiveUsageError):
        step(lambda b: net(b["x"]).sum(), given, loss="sum", maximum=4)
    assert given["x"] is x


@pytest.mark.parametrize("options", [{"minimum": 8}, {"batchnorm": "per_chunk"}])
def test_a_maximum_below_the_fewest_samples_is_refused(options):
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    with pytest.raises(AdaptiveUsageError, match=r"^maximum=1 is below [28], the fewest"):
        step(lambda x: net(x).sum(), batch(), loss="sum", maximum=1, **options)


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.ones = None
        self.n_calls = 0

    def forward(self, x):
        if self.ones is None:
            self.ones = torch.ones(3, dtype=torch.float64)
        self.n_calls += 1
        return self.linear(x) * self.ones


@pytest.mark.parametrize("loss", ["mean", lambda out: out.std()], ids=["mean", "outputs"])
def test_a_cache_on_a_module_that_a_failed_attempt_filled_is_filled_again(loss):
    net = Remembering().double()

    def fn(x):
        out = net(x)
        if len(x) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return out if callable(loss) else out.mean()

    assert step(fn, batch(), loss=loss).sizes == (4, 4)
    assert net.n_calls == 2
    assert torch.equal(net.ones, torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("maximum", [8, 3])
def test_a_hook_of_several_gradients_runs_once_with_all_of_them(maximum):
    torch.manual_seed(0)
    net = nn.Linear(4, 4).double()
    seen = []
    torch.autograd.graph.register_multi_grad_hook(
        list(net.parameters()), lambda gradients: seen.append([g.clone() for g in gradients])
    )
    step(lambda b: net(b).square().mean(), batch(), maximum=maximum)
    assert len(seen) == 1
    torch.testing.assert_close(seen[0][0], net.weight.grad, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(seen[0][1], net.bias.grad, rtol=1e-10, atol=1e-12)


def test_a_hook_that_waits_may_change_the_gradient_and_take_itself_away():
    net = nn.Linear(4, 4).double()
    prior = net.weight.grad = torch.ones(4, 4, dtype=torch.float64)
    handles = [net.weight.register_hook(lambda gradient: handles[0].remove() or gradient * 0)]
    step(lambda b: net(b).square().mean(), batch(), maximum=3)
    assert net.weight.grad is prior
    assert torch.equal(prior, torch.ones_like(prior))
    assert not net.weight._backward_hooks


def test_a_gradient_whose_elements_share_memory_is_added_to():
    net = nn.Linear(4, 3).double()
    net.weight.grad = torch.ones(3, 4, dtype=torch.float64)
    prior = net.bias.grad = torch.ones((), dtype=torch.float64).expand(3)
    step(lambda b: net(b).sum(), batch(), loss="sum", maximum=3)
    assert net.bias.grad is prior
    assert prior.tolist() == [9.0] * 3
