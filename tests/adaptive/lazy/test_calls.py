"""What makes two calls alike, what a call is tried with, and calls that can't be split."""

import operator
import warnings
from collections import UserDict, defaultdict

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tenure.adaptive import (
    AdaptiveUsageError,
    BatchCoupledError,
    LazyTensor,
    OutOfRetriesError,
    SplitMismatchError,
    lazy,
)

from .programs import WIDE, RoomFor, assert_same, gradients, mlp

A = torch.tensor([[0.3, -1.2, 2.0], [0.7, 0.1, 0.9]], dtype=torch.float64)
B = torch.tensor([[1.5, 0.4, -0.6], [2.5, 3.0, 0.2]], dtype=torch.float64)

_BINARY = "add sub mul truediv pow mod eq ne lt le gt ge floordiv matmul"


def _same(found, expected):
    assert isinstance(found, LazyTensor)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    torch.testing.assert_close(found.value(), expected, equal_nan=True)


def _twins(n):
    x, y = lazy(torch.zeros(n), torch.ones(n))
    one, other = torch.ones(n), torch.full((n,), 2.0)
    return {
        "broadcast": (
            lambda: torch.broadcast_tensors(x, x)[1] + 0,
            lambda: torch.broadcast_tensors(x, y)[1] + 0,
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
@pytest.mark.parametrize("name", ["broadcast", "where", "two of three"])
def test_a_tensor_that_is_given_twice_is_another_call_than_two_tensors(name, order):
    # of a size of its own, as what is known of a call is known from then on
    *calls, wanted = _twins(31 + order[0])[name]
    for i in order:
        assert torch.equal(calls[i]().value(), wanted[i])


def test_no_trial_of_a_call_warns_and_a_warning_of_the_call_itself_is_the_users():
    """A plain target has another size than the samples that a call is tried with."""
    net, x, y = nn.Linear(4, 1), torch.randn(64, 4), torch.randn(64, 1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        F.mse_loss(net(lazy(x)), y).backward()
    assert [str(each.message) for each in seen] == []
    with pytest.warns(UserWarning, match=r"target size \(torch.Size\(\[64\]\)\)"):
        F.mse_loss(net(lazy(x)), y[:, 0]).backward()


# --- mixes of recorded and plain


# the cases of koila 0.1.1, https://github.com/rentruewang/koila, by behaviour
@pytest.mark.parametrize("name", _BINARY.split())
def test_operators_of_recorded_and_plain_tensors_in_any_mix(name):
    apply, b = getattr(operator, name), B.T if name == "matmul" else B
    for left, right in ((lazy(A), lazy(b)), (lazy(A), b), (A, lazy(b))):
        _same(apply(left, right), apply(A, b))
    if name in ("add", "sub", "mul", "truediv", "pow", "floordiv", "mod"):
        _same(apply(lazy(B), 2), apply(B, 2))
        _same(apply(2.5, lazy(B)), apply(2.5, B))
    _same(lazy(A[:1]).squeeze(), A[0])


def test_other_things_come_back_as_they_are():
    assert lazy(None) is None
    assert lazy("text", 3) == ("text", 3)
    made = lazy({"x": A, "n": [B, 1]})
    assert isinstance(made["x"], LazyTensor)
    assert isinstance(made["n"][0], LazyTensor)
    made = lazy(UserDict(x=A), defaultdict(list, x=[A]))
    assert isinstance(made[0]["x"], LazyTensor)
    assert isinstance(made[1]["x"][0], LazyTensor)
    assert made[1]["y"] == []
    assert lazy(lazy(A), batch=0).shape == (2, 3)


@pytest.mark.parametrize("dim", [-1, numpy.int64(1)])
def test_the_batch_may_stand_in_any_dimension(dim, model, x):

    def program(wrap):
        recorded = wrap(x.T.contiguous()) if wrap is not lazy else lazy(x.T.contiguous(), batch=dim)
        model(recorded.transpose(0, 1)).square().mean().backward()

    assert_same(model, program, room=3)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("width", [5, 8])
def test_the_states_of_a_recurrent_network_are_cut_and_weights_of_as_many_rows_are_not(kind, width):
    torch.manual_seed(0)
    model = nn.ModuleList([kind(4, width, batch_first=True), nn.Linear(width, WIDE)]).double()
    x = torch.randn(8, 3, 4).double()

    def program(wrap):
        out, _ = model[0](wrap(x))
        loss = model[1](out[:, -1]).square().mean()
        loss.backward()
        return loss.item()

    assert_same(model, program, room=3)


# --- what has to run whole: the error says which call is the reason


class Packed(nn.Module):
    """A recurrent network over sequences of several lengths."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(4, WIDE // 4, batch_first=True)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return out


def test_packed_sequences_run_whole_and_are_the_reason_if_they_do_not_fit():
    torch.manual_seed(0)
    model, x = Packed().double(), torch.randn(8, 5, 4).double()
    lengths = torch.tensor([5, 3, 4, 2, 5, 1, 2, 3])

    def program(wrap):
        loss = model(*wrap(x, lengths)).square().mean()
        loss.backward()
        return loss.item()

    assert_same(model, program)
    text = r"lstm\(\) at .*test_calls.py:\d+ ran out of memory on all 8 samples, .*smaller batch"
    with RoomFor(3), pytest.raises(OutOfRetriesError, match=text) as caught:
        program(lazy)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_what_can_not_be_recorded_is_refused_by_name(x):
    for scripted in (torch.jit.script(mlp()), torch.jit.trace(mlp(), x)):
        with pytest.raises(AdaptiveUsageError, match=r"forward\(\) of a model in TorchScript"):
            scripted(lazy(x))
    for dim in (1, None):
        told = rf"has no dimension {dim} .*a plain tensor if"
        with pytest.raises(AdaptiveUsageError, match=told):
            lazy(torch.ones(3), batch=dim)
    a = lazy(x)
    with pytest.raises(AdaptiveUsageError, match=r"unsqueeze_\(\) would give .* in place"):
        a.unsqueeze_(1)
    assert a.sum().item() == pytest.approx(x.sum().item())


@pytest.mark.parametrize("room", [1, 3])
def test_a_view_that_takes_samples_by_number_is_named_beside_a_weight_of_as_many_rows(
    room, model, x
):
    """A weight of 6 rows for each of 8 samples is no tensor of samples."""
    text = r"view\(\) at .*test_calls.py:\d+ wants all samples \(it "
    with RoomFor(room), pytest.raises(BatchCoupledError, match=text):
        model(lazy(x).view(2, 4, -1)).square().mean().backward()
    assert all(p.grad is None for p in model.parameters())


# --- calls that name places among the samples, which the first few samples do not show


def _zeroed(out, index):
    out[index] = 0.0
    return out


# Each changes nothing of three samples, whole or in parts, and something of eight.
PLACES = {
    "triu": lambda out: out.triu(-5),
    "triu_": lambda out: out.triu_(-5),
    "roll": lambda out: out.roll(6, 0),
    "slice": lambda out: _zeroed(out, slice(5, None)),
    "as_strided": lambda out: out.as_strided((out.size(0), 3), (3, 1), 0),
    # one number of the fourth sample is among the others of the seventh
    "isin": lambda out: out * torch.isin((out[:, :1] * 100).round(), (out[:, 1:2] * 100).round()),
}
REFUSALS = (AdaptiveUsageError, BatchCoupledError, OutOfRetriesError, SplitMismatchError)


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_values_and_gradients_are_those_of_the_whole_or_refused(place, trains, model, x):

    def run(wrap):
        with torch.set_grad_enabled(trains):
            out = model(wrap(x))
            if not trains:
                found = place(out)
                return found.value() if wrap is lazy else found
            (out * place(out * 1)).square().mean().backward()
        found = gradients(model)
        model.zero_grad()
        return found

    expected = run(lambda x: x)
    with RoomFor(3):
        try:
            found = run(lazy)
        except REFUSALS:
            assert not gradients(model)
            return
    torch.testing.assert_close(found, expected)
