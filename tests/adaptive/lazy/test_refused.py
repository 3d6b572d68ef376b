"""What has to run whole and does not fit: the error says which call is the reason."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tenure.adaptive import AdaptiveUsageError, OutOfRetriesError, lazy

from .programs import WIDE, RoomFor, assert_same_gradients, batch, mlp

pytestmark = pytest.mark.usefixtures("forgetful")


class Packed(nn.Module):
    """A recurrent network over sequences of several lengths."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(4, WIDE // 4, batch_first=True)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return out


def _sequences():
    torch.manual_seed(0)
    return Packed().double(), torch.randn(8, 5, 4).double(), torch.tensor([5, 3, 4, 2, 5, 1, 2, 3])


def test_packed_sequences_run_whole():
    model, x, lengths = _sequences()

    def program(wrap):
        a, n = wrap(x, lengths)
        loss = model(a, n).square().mean()
        loss.backward()
        return loss.item()

    expected, found = assert_same_gradients(model, program)
    assert found == pytest.approx(expected, rel=1e-11)


def test_packed_sequences_that_do_not_fit_are_the_reason():
    model, x, lengths = _sequences()
    text = r"lstm\(\) at .*test_refused.py:\d+ ran out of memory on all 8 samples, .*smaller batch"
    with RoomFor(3), pytest.raises(OutOfRetriesError, match=text) as caught:
        model(*lazy(x, lengths))
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_a_graph_of_gradients_that_does_not_fit_is_the_reason():
    model, (x, _) = mlp(), batch()
    loss = model(lazy(x)).square().mean()
    text = r"can't be split: backward\(create_graph=True\) wants the graph of the whole batch"
    with RoomFor(3), pytest.raises(OutOfRetriesError, match=text):
        loss.backward(create_graph=True)
    assert all(p.grad is None for p in model.parameters())


class RoomBehind(RoomFor):
    """The forward pass fits, and its gradients do not."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("call", ["backward", "grad"])
def test_a_graph_of_gradients_that_runs_out_half_way_is_the_reason(call):
    model, (x, _) = mlp(), batch()
    a = lazy(x).requires_grad_()
    out = model(a).square().mean()
    text = rf"can't be split: .*{call}\(.*\) wants the graph of the whole batch"
    calls = {
        "grad": lambda: torch.autograd.grad(out, a, create_graph=True),
        "backward": lambda: out.backward(create_graph=True),
    }
    with RoomBehind(8), pytest.raises(OutOfRetriesError, match=text):
        calls[call]()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("room", [None, 3])
def test_a_model_of_torchscript_runs_whole_or_is_the_reason(room):
    plain = mlp()
    model, (x, _) = torch.jit.script(plain), batch()
    if room is None:
        wanted = plain(x).square().mean()
        loss = model(lazy(x)).square().mean()
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-11)
        return
    # an error of Python loses its text there, unlike one of a device
    loss = model(lazy(x)).square().mean()
    text = r"forward\(\) of a model in TorchScript failed, .*memory_budget\(\)"
    with RoomFor(room), pytest.raises(AdaptiveUsageError, match=text):
        loss.backward()
    assert all(p.grad is None for p in plain.parameters())


def test_where_no_two_samples_fit_it_is_said_that_nothing_could_be_tried():
    model, (x, _) = mlp(), batch()
    with (
        RoomFor(1),
        pytest.raises(OutOfRetriesError, match=r"^What was recorded does not fit whole"),
    ):
        torch.cov(model(lazy(x)).T).square().sum().backward()
    assert all(p.grad is None for p in model.parameters())
