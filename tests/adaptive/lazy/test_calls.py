"""What makes two calls alike, what a call is tried with, and calls that torch itself takes over."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tenure.adaptive import AdaptiveUsageError, lazy

from .programs import assert_same_gradients, batch, mlp

pytestmark = pytest.mark.usefixtures("forgetful")


class Double(torch.autograd.Function):
    """A function with a backward pass of its own."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 7


def _required(x):
    return lazy(x.requires_grad_())


def _written(x):
    a = lazy(x)
    a.add_(nn.Parameter(torch.ones(4, dtype=torch.float64)))
    return a


def _computed(x):
    return (lazy(x) * 2).requires_grad_()


@pytest.mark.parametrize("make", [_required, _written, _computed])
def test_a_function_of_its_own_is_refused_wherever_gradients_begin(make):
    x, _ = batch()
    with pytest.raises(AdaptiveUsageError, match="came out of 'Double'"):
        Double.apply(make(x)).sum().backward()


def test_a_reentrant_checkpoint_of_an_embedding_with_a_hook_is_refused():
    """As `enable_input_require_grads` does for adapters."""
    embedding = nn.Embedding(10, 8).requires_grad_(False)
    embedding.register_forward_hook(lambda module, args, out: out.requires_grad_(True))
    adapter = nn.Linear(8, 8)
    tokens = torch.randint(0, 10, (16, 5))
    hidden = checkpoint(adapter, embedding(lazy(tokens)), use_reentrant=True)
    with pytest.raises(AdaptiveUsageError, match="came out of 'Checkpoint"):
        hidden.square().mean().backward()
    with pytest.raises(AdaptiveUsageError, match="use_reentrant=False"):
        hidden.sum()


def test_gradients_that_are_not_wanted_any_more_go_through_a_function_of_its_own():
    x, _ = batch()
    a = (lazy(x) * 1).requires_grad_().requires_grad_(False)
    assert torch.equal(Double.apply(a).value(), x * 2)


def _twins(n):
    x, y = lazy(torch.zeros(n), torch.ones(n))
    one, other = torch.ones(n), torch.full((n,), 2.0)
    return {
        "broadcast": (
            lambda: torch.broadcast_tensors(x, x)[1] + 0,
            lambda: torch.broadcast_tensors(x, y)[1] + 0,
            [torch.zeros(n), torch.ones(n)],
        ),
        "at least": (
            lambda: torch.atleast_1d(x, x)[1] + 0,
            lambda: torch.atleast_1d(x, y)[1] + 0,
            [torch.zeros(n), torch.ones(n)],
        ),
        "where": (
            lambda: torch.where(x > 0, one, one),
            lambda: torch.where(x > 0, other, one),
            [one, one],
        ),
        "two of three": (
            lambda: torch.addcmul(x + 1, y, y),
            lambda: torch.addcmul(x + 1, y, x),
            [other, one],
        ),
    }


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("name", ["broadcast", "at least", "where", "two of three"])
def test_a_tensor_that_is_given_twice_is_another_call_than_two_tensors(name, order):
    # of a size of its own, as what is known of a call is known from then on
    *calls, wanted = _twins(31 + order[0])[name]
    for i in order:
        assert torch.equal(calls[i]().value(), wanted[i])


def test_another_default_dtype_is_another_call():
    assert (lazy(torch.arange(4)) / 2).dtype is torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert (lazy(torch.arange(4)) / 2).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_no_trial_of_a_call_warns():
    """A plain target has another size than the samples that a call is tried with."""
    net, x, y = nn.Linear(4, 1), torch.randn(64, 4), torch.randn(64, 1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        F.mse_loss(net(lazy(x)), y).backward()
    assert [str(each.message) for each in seen] == []


def test_a_warning_of_the_call_itself_is_the_users():
    net, x, y = nn.Linear(4, 1), torch.randn(64, 4), torch.randn(64)
    with pytest.warns(UserWarning, match=r"target size \(torch.Size\(\[64\]\)\)"):
        F.mse_loss(net(lazy(x)), y).backward()


@pytest.mark.parametrize("make", ["new_tensor", "tensor", "as_tensor"])
def test_the_number_of_samples_in_a_tensor_is_a_number(make):
    model, (x, _) = mlp(), batch()

    def program(wrap):
        out = model(wrap(x))
        n = out.shape[0]
        count = out.new_tensor(n) if make == "new_tensor" else getattr(torch, make)(n)
        loss = out.square().sum() / count
        loss.backward()
        return loss.item()

    expected, found = assert_same_gradients(model, program, 3)
    assert found == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize("room", [None, 15])
@pytest.mark.parametrize("batch_first", [True, False])
def test_a_batchmean_divides_by_the_first_dimension(room, batch_first):
    model = mlp()
    x = torch.randn(8, 5, 4, dtype=torch.float64)

    def program(wrap):
        out = model(wrap(x)).log_softmax(-1)
        target = torch.full((8, 5, 3), 1 / 3, dtype=torch.float64)
        if not batch_first:
            out, target = out.transpose(0, 1), target.transpose(0, 1)
        loss = F.kl_div(out, target, reduction="batchmean")
        loss.backward()
        return loss.item()

    expected, found = assert_same_gradients(model, program, room)
    assert found == pytest.approx(expected, rel=1e-11)
