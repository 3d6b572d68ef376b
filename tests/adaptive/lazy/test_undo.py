"""What recorded calls change besides values: buffers and random state, once for all attempts."""

import gc
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


def norm():
    return narrow(nn.BatchNorm1d(4))


def norm_that_nothing_trains():
    """Its statistics are of the batch alone."""
    return nn.Sequential(nn.BatchNorm1d(16, affine=False), narrow()).double()


def spectral():
    return narrow(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.BatchNorm1d(4))


def counting():
    return narrow(Counting(), nn.BatchNorm1d(4))


def images():
    """Instances are normalized one by one, and their statistics are of the batch."""
    torch.manual_seed(0)
    before = nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 32, 3, padding=1), nn.Tanh()
    after = nn.Conv2d(32, 2, 3), nn.InstanceNorm2d(2, track_running_stats=True), nn.Flatten()
    return nn.Sequential(*before, *after, nn.Linear(8, 1)).double()


def batch():
    return torch.randn(512, 16, generator=torch.Generator().manual_seed(1)).double()


def read_before(model, x, wrap):
    loss = model(wrap(x)).square().mean()
    loss.item()
    loss.backward()


def read_after(model, x, wrap):
    out = model(wrap(x))
    loss = out.square().mean()
    loss.backward()
    out.sum().item()


def values_alone(model, x, wrap):
    with torch.no_grad():
        model(wrap(x)).sum(1).tolist()


def beside_the_loss(model, x, wrap):
    """A part with buffers that no loss is made of, and that nobody reads."""
    a = wrap(x)
    hidden = model[:5](a)
    model[5](hidden)
    hidden.square().mean().backward()


def trained(make, program, n_steps, wrap=lambda x: x):
    """Buffers, gradients and a random number after some steps."""
    model, x = make(), batch()
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(n_steps):
        optimizer.zero_grad()
        program(model, x, wrap)
        optimizer.step()
    found = dict(model.named_buffers())
    found |= {f"{n}.grad": p.grad for n, p in model.named_parameters() if p.grad is not None}
    return found


def peak_of(make, program):
    with memory_budget("1GiB") as budget:
        trained(make, program, 1)
    return budget.peak_bytes


@pytest.mark.exhaustive
@pytest.mark.parametrize("program", [read_after, read_before, values_alone, beside_the_loss])
@pytest.mark.parametrize("make", [norm, norm_that_nothing_trains, spectral, counting, images])
def test_buffers_are_written_once_for_each_step(make, program):
    if program is beside_the_loss and make in (norm_that_nothing_trains, images):
        pytest.skip("has no such part")
    expected = {n_steps: trained(make, program, n_steps) for n_steps in (1, 6)}
    peak_bytes, n_ooms = peak_of(make, program), 0
    for share, n_steps in [(0.95, 1), (0.85, 6), (0.75, 1), (0.7, 1), (0.65, 6), (0.6, 1)]:
        reset()
        statistics().reset()
        with memory_budget(int(peak_bytes * share)), warnings.catch_warnings():
            warnings.simplefilter("error")
            found = trained(make, program, n_steps, lazy)
        n_ooms += statistics().ooms
        assert found.keys() == expected[n_steps].keys()
        for name, tensor in expected[n_steps].items():
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
        state = torch.get_rng_state(), model.generator.get_state(), loss.value()
        return statistics().ooms, [*state, *model.buffers(), *gradients(model).values()]

    with RoomFor(3):
        n_ooms, found = run()
        found = [tensor.clone() for tensor in found]
        n_later, again = run()
    assert (n_ooms > 0, n_later) == (True, 0)
    for one, other in zip(found, again, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)


@pytest.mark.parametrize("read", [torch.Tensor.backward, torch.Tensor.item])
def test_where_nothing_fits_all_is_as_before(read):
    """Not what ran once, before the parts: it is of the batch alone."""
    first = nn.BatchNorm1d(4, affine=False).double()
    model = nn.Sequential(first, nn.Dropout(0.5), Noisy(torch.Generator()))
    x = torch.randn(8, 4, dtype=torch.float64)
    loss = model(lazy(x)).square().mean()
    before = [torch.get_rng_state(), model[2].generator.get_state(), *model.buffers()]
    before = [tensor.clone() for tensor in before]
    with RoomFor(0), pytest.raises(TenureError):
        read(loss)
    after = [torch.get_rng_state(), model[2].generator.get_state(), *model.buffers()]
    assert all(map(torch.equal, before, after))
    assert not gradients(model)
    # and it can be read where there is room
    assert loss.item() > 0


class Stops(TorchDispatchMode):
    """Somebody presses Ctrl-C in the middle of the program."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.tanh.default and not isinstance(args[0], FakeTensor):
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("read", [torch.Tensor.backward, torch.Tensor.item])
def test_an_interrupt_leaves_all_as_before(read):
    model, x = nn.BatchNorm1d(4).double(), torch.randn(8, 4, dtype=torch.float64)
    loss = model(lazy(x)).tanh().square().mean()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with Stops(), pytest.raises(KeyboardInterrupt):
        read(loss)
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)
    read(loss)
    assert model.num_batches_tracked == 1
    torch.testing.assert_close(model.running_mean, 0.1 * x.mean(0))


@pytest.mark.parametrize("trains", [True, False])
def test_nothing_waits_for_the_collector(trains):
    x = batch()
    with memory_budget("800KiB" if trains else "400KiB") as budget:
        model, live = narrow(nn.BatchNorm1d(4)), []
        gc.disable()
        try:
            for _ in range(4):
                model.zero_grad()
                with torch.set_grad_enabled(trains):
                    loss = model(lazy(x)).square().mean()
                    _ = loss.backward() if trains else loss.item()
                del loss
                model.zero_grad()
                live.append(budget.live_bytes)
        finally:
            gc.enable()
    assert live[1:] == live[:1] * 3
