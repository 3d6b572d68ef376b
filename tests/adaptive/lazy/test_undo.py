"""What recorded calls change besides values: buffers and random state, once for all attempts."""

import warnings

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tenure import TenureError
from tenure.adaptive import lazy, memory_budget, reset, statistics

from .programs import RoomFor, gradients, mlp

pytestmark = pytest.mark.usefixtures("forgetful")


class Counting(nn.Module):
    """Counts its calls and averages what it sees, in buffers of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("n_calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("seen", torch.zeros(4, dtype=torch.float64))

    def forward(self, x):
        self.n_calls += 1
        with torch.no_grad():
            self.seen.mul_(0.9).add_(x.mean(0))
        return x


def narrow(*middle):
    """A network whose activations grow with the batch, and what stands in its middle."""
    torch.manual_seed(0)
    wide = nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)
    return nn.Sequential(*wide, *middle, nn.Linear(4, 1)).double()


def counting():
    torch.manual_seed(1)
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    return narrow(Counting(), nn.BatchNorm1d(4), spectral)


def norm_that_nothing_trains():
    """Its statistics are of the batch alone."""
    return nn.Sequential(nn.BatchNorm1d(16, affine=False), narrow()).double()


def batch():
    return torch.randn(512, 16, generator=torch.Generator().manual_seed(1)).double()


def read_and_trained(model, x, wrap):
    out = model(wrap(x))
    loss = out.square().mean()
    loss.item()
    loss.backward()
    out.sum().item()


def values_alone(model, x, wrap):
    with torch.no_grad():
        model(wrap(x)).sum(1).tolist()


def beside_the_loss(model, x, wrap):
    """A part with buffers that no loss is made of, and that nobody reads."""
    hidden = model[:5](wrap(x))
    model[5](hidden)
    hidden.square().mean().backward()


def trained(make, program, wrap=lambda x: x):
    """Buffers and gradients after two steps."""
    model, x = make(), batch()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(2):
        optimizer.zero_grad()
        program(model, x, wrap)
        optimizer.step()
    found = dict(model.named_buffers())
    found |= {f"{n}.grad": p.grad for n, p in model.named_parameters() if p.grad is not None}
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("make", "program"),
    [
        (counting, read_and_trained),
        (counting, values_alone),
        (counting, beside_the_loss),
        (norm_that_nothing_trains, read_and_trained),
    ],
)
def test_buffers_are_written_once_for_each_step(make, program):
    with memory_budget("1GiB") as budget:
        expected = trained(make, program)
    n_ooms = 0
    for share in (0.95, 0.75, 0.6):
        reset()
        statistics().reset()
        with memory_budget(int(budget.peak_bytes * share)), warnings.catch_warnings():
            warnings.simplefilter("error")
            found = trained(make, program, lazy)
        n_ooms += statistics().ooms
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-12, msg=name)
    # what piles up last may be all that is large
    assert n_ooms or program is values_alone


class Noisy(nn.Module):
    """Drops by torch's own generator, by one of its own, and normalizes."""

    def __init__(self, generator):
        super().__init__()
        self.body, self.norm, self.generator = mlp(), nn.BatchNorm1d(3).double(), generator

    def forward(self, x):
        mask = torch.bernoulli(x.sigmoid(), generator=self.generator)
        return self.norm(self.body(torch.dropout(x * mask, 0.5, True)))


@pytest.mark.parametrize("trains", [True, False])
def test_random_numbers_and_statistics_are_those_of_the_attempt_that_fits(trains):
    model, x = Noisy(torch.Generator()), torch.randn(8, 4, dtype=torch.float64)
    start = {k: v.clone() for k, v in model.state_dict().items()}

    def run():
        model.load_state_dict(start)
        model.zero_grad()
        torch.manual_seed(5)
        model.generator.manual_seed(6)
        statistics().reset()
        with torch.set_grad_enabled(trains):
            loss = model(lazy(x)).square().mean()
            _ = loss.backward() if trains else loss.item()
        found = [torch.get_rng_state(), model.generator.get_state(), loss.value()]
        found += [*model.buffers(), *gradients(model).values()]
        return statistics().ooms, [tensor.clone() for tensor in found]

    with RoomFor(3):
        n_ooms, found = run()
        n_later, again = run()
    assert (n_ooms > 0, n_later) == (True, 0)
    torch.testing.assert_close(found, again, rtol=1e-12, atol=0)


class Stops(TorchDispatchMode):
    """Somebody presses Ctrl-C in the middle of the program."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.addmm.default and not isinstance(args[0], FakeTensor):
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("read", [torch.Tensor.backward, torch.Tensor.item])
@pytest.mark.parametrize("why", ["nothing fits", "an interrupt"])
def test_where_nothing_is_computed_all_is_as_before(read, why):
    """Not what ran once, before the parts: it is of the batch alone."""
    first = nn.BatchNorm1d(4, affine=False).double()
    model = nn.Sequential(first, nn.Dropout(0.5), Noisy(torch.Generator()))
    x = torch.randn(8, 4, dtype=torch.float64)
    loss = model(lazy(x)).square().mean()

    def state():
        found = [torch.get_rng_state(), model[2].generator.get_state(), *model.buffers()]
        return [tensor.clone() for tensor in found]

    before = state()
    mode, error = (
        (Stops(), KeyboardInterrupt) if why == "an interrupt" else (RoomFor(0), TenureError)
    )
    with mode, pytest.raises(error):
        read(loss)
    assert all(map(torch.equal, before, state()))
    assert not gradients(model)
    # and it can be read where there is room
    assert loss.item() > 0
    assert first.num_batches_tracked == 1
