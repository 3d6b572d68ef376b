"""What recorded calls change besides values: buffers and random state, once for all attempts."""

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tenure import TenureError
from tenure.adaptive import lazy, statistics

from ..unchanged import unchanged
from .programs import RoomFor, assert_same, batch, gradients, mlp


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


def read_and_trained(model, x):
    out = model(x)
    loss = out.square().mean()
    loss.item()
    loss.backward()
    out.sum().item()


def values_alone(model, x):
    with torch.no_grad():
        model(x).sum(1).tolist()


def beside_the_loss(model, x):
    """A part with buffers that no loss is made of, and that nobody reads."""
    hidden = model[:2](x)
    model[2:](hidden)
    hidden.square().mean().backward()


@pytest.mark.parametrize("room", [None, 3])
@pytest.mark.parametrize("program", [read_and_trained, values_alone, beside_the_loss])
def test_buffers_are_written_once_for_each_step(program, room):
    torch.manual_seed(1)
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    # the statistics of the first are of the batch alone
    first = nn.BatchNorm1d(4, affine=False)
    model = nn.Sequential(first, mlp(n_out=4), Counting(), nn.BatchNorm1d(4), spectral).double()
    x, _ = batch()
    start = {name: value.clone() for name, value in model.state_dict().items()}

    def run(wrap):
        model.load_state_dict(start)
        for _ in range(2):
            program(model, wrap(x))
        return {name: value.clone() for name, value in model.named_buffers()}

    assert_same(model, run, room, rtol=1e-9)


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
    loss, drawn = model(lazy(x)).square().mean(), model[2].generator.get_state()
    mode, error = (
        (Stops(), KeyboardInterrupt) if why == "an interrupt" else (RoomFor(0), TenureError)
    )
    with unchanged(model), mode, pytest.raises(error):
        read(loss)
    assert torch.equal(model[2].generator.get_state(), drawn)
    # and it can be read where there is room
    assert loss.item() > 0
    assert first.num_batches_tracked == 1


def test_an_attempt_that_fails_leaves_what_an_earlier_program_wrote():
    first, model, (x, _) = nn.BatchNorm1d(4).double(), mlp(), batch()

    def program(wrap):
        first.reset_running_stats()
        with torch.no_grad():
            normed = first(wrap(x))
            normed.sum().item()
        model(normed).sum().backward()
        return first.running_mean.clone()

    assert_same(model, program, room=3)
