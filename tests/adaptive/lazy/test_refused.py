"""What has to run whole and does not fit: the error says which call is the reason."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tenure.adaptive import AdaptiveUsageError, BatchCoupledError, OutOfRetriesError, lazy

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


def test_a_model_of_torchscript_is_refused_by_name():
    model, (x, _) = torch.jit.script(mlp()), batch()
    with pytest.raises(AdaptiveUsageError, match=r"forward\(\) of a model in TorchScript"):
        model(lazy(x))


@pytest.mark.parametrize("batch", [1, None])
def test_a_tensor_without_samples_is_refused_by_name(batch):
    with pytest.raises(AdaptiveUsageError, match=rf"has no dimension {batch} .*a plain tensor if"):
        lazy(torch.ones(3), batch=batch)


def test_another_shape_in_place_is_refused_by_name():
    x, _ = batch()
    a = lazy(x)
    with pytest.raises(AdaptiveUsageError, match=r"unsqueeze_\(\) would give .* in place"):
        a.unsqueeze_(1)
    assert a.sum().item() == pytest.approx(x.sum().item())


def test_where_no_two_samples_fit_it_is_said_that_nothing_could_be_tried():
    # of a size of its own, as what was tried of a call is known from then on
    model, (x, _) = mlp(), batch(11)
    with (
        RoomFor(1),
        pytest.raises(OutOfRetriesError, match="can't be split: two samples of it, tried with"),
    ):
        torch.cov(model(lazy(x)).T).square().sum().backward()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("room", [1, 3])
def test_a_view_that_takes_samples_by_number_is_named_beside_a_weight_of_as_many_rows(room):
    """A weight of 6 rows for each of 8 samples is no tensor of samples."""
    model, (x, _) = mlp(), batch()
    text = r"view\(\) at .*test_refused.py:\d+ wants all samples \(it "
    with RoomFor(room), pytest.raises(BatchCoupledError, match=text):
        model(lazy(x).view(2, 4, -1)).square().mean().backward()
    assert all(p.grad is None for p in model.parameters())
