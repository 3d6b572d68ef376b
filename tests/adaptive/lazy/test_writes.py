"""What is written in place: into a batch, through a view, and behind the recording's back."""

import pytest
import torch
from torch.nn import functional as F

from tenure.adaptive import AdaptiveUsageError, lazy

from .programs import RoomFor, assert_same_gradients, batch, gradients, mlp

pytestmark = pytest.mark.usefixtures("forgetful")
ORDER = torch.randperm(8, generator=torch.Generator().manual_seed(2))


def _passed_twice(model, a, b):
    a.sub_(0.5).div_(0.1)
    model(a).square().mean().backward()
    first = [p.grad.sum().item() for p in model.parameters()]
    # as SAM does
    model(a).square().mean().backward()
    return [*first, a.mean().item(), a[0, 0].item()]


def _in_a_loss_over_the_batch(model, a, b):
    a.mul_(3)
    loss = model(a).square().mean() * a.std() + (model(a) @ a[:, :3].t()).logsumexp(1).sum()
    loss.backward()
    return [loss.item()]


def _without_gradients(model, a, b):
    a.mul_(3)
    with torch.no_grad():
        out = model(a)
    return [out.sum().item(), a.sum().item(), a.mul_(2).sum().item(), model(a).sum().item()]


def _by_a_view_that_nobody_uses_again(model, a, b):
    """As masks of sliding windows do."""
    view = a[:, :2]
    a[:, :2] = view.clamp(max=0)
    loss = model(a).square().mean()
    loss.backward()
    return [a.sum().item(), loss.item()]


def _rows_and_labels(model, a, b):
    """As CutMix does."""
    a[:, 1:3] = a[ORDER, 1:3]
    b = b[ORDER]
    loss = F.cross_entropy(model(a), b)
    loss.backward()
    return [loss.item(), a.sum().item(), a[0, 1].item(), F.cross_entropy(model(a), b).item()]


def _columns(model, a, b):
    a -= a.mean(0)
    a[:, 0] = a[:, 0].flip(0)
    a.mul_(2)
    loss = F.cross_entropy(model(a), b)
    loss.backward()
    return [loss.item(), a.sum().item()]


def _masked_labels(model, a, b):
    b.masked_fill_(a[:, 0] > 0, -100)
    loss = F.cross_entropy(model(a), b)
    loss.backward()
    return [loss.item(), (b != -100).sum().item()]


def _set_labels_of_a_copy(model, a, b):
    b = b.clone()
    b[a[:, 0] > 0] = -100
    loss = F.cross_entropy(model(a), b)
    loss.backward()
    return [loss.item(), (b != -100).sum().item()]


def _what_a_model_gave(model, a, b):
    a[:, 0] = model(a).detach()[:, 0]
    loss = (model(a) - a.mean(0)[:3]).square().mean()
    loss.backward()
    return [loss.item()]


def _by_index(model, a, b):
    a[:, 0] *= 2
    a[..., 2:4] -= a[:, :2]
    out = model(a)
    out[:, 1] *= 3
    before = out.sum().item()
    out[:, :2] += out.max().item()
    loss = (out * out.sum(1, keepdim=True)).square().mean()
    loss.backward()
    return [before, loss.item(), out.sum().item(), a.sum().item()]


def _parameters(model, a, b):
    a.add_(model[0].bias[:4])
    loss = model(a - a.mean(0)).square().mean() + model(a).square().mean()
    loss.backward()
    return [loss.item()]


WRITES = [
    _passed_twice,
    _in_a_loss_over_the_batch,
    _without_gradients,
    _by_a_view_that_nobody_uses_again,
    _rows_and_labels,
    _columns,
    _masked_labels,
    _set_labels_of_a_copy,
    _what_a_model_gave,
    _by_index,
    _parameters,
]


@pytest.mark.parametrize("room", [None, 3])
@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_is_what_a_plain_program_writes_and_not_into_the_users_tensors(write, room):
    model, (x, y) = mlp(), batch()
    before = x.clone(), y.clone()
    if write is _parameters and room:
        room = None  # a write of the model's into the batch makes it no part of the batch alone

    def program(wrap):
        return write(model, *(wrap(x, y) if wrap is lazy else (x.clone(), y.clone())))

    expected, found = assert_same_gradients(model, program, room)
    assert found == pytest.approx(expected, rel=1e-11)
    assert torch.equal(x, before[0])
    assert torch.equal(y, before[1])


def test_a_write_is_done_once_where_a_second_loss_starts_over():
    model, (x, _) = mlp(), batch()
    a = x * 3
    (model(a).square().mean() + model(a).abs().mean() + model(a).mean()).backward()
    wanted = gradients(model)
    model.zero_grad()
    recorded = lazy(x.clone())
    recorded.mul_(3)
    first, second = model(recorded).square().mean(), model(recorded).abs().mean()
    first.backward()
    with RoomFor(3):
        (second + model(recorded).mean()).backward()
    assert recorded.sum().item() == pytest.approx(a.sum().item(), rel=1e-12)
    torch.testing.assert_close(gradients(model), wanted, rtol=1e-11, atol=1e-13)


def _elsewhere(a):
    view = a[:, 1]
    view.mul_(2)
    a[:, 2] = view


def _another_view(a):
    view, _ = a[:, 1], a[:, 0].mul_(3)
    view.mul_(2)


def _a_view_of_before(a):
    view = a[:, :2]
    a[:, 0] *= 2
    view.sum()


@pytest.mark.parametrize("write", [_elsewhere, _another_view, _a_view_of_before])
def test_other_writes_through_a_view_of_a_recorded_tensor_are_refused(write):
    x, _ = batch()
    with pytest.raises(AdaptiveUsageError, match=r"Write by index, as in x\[:, 0\] \+= 1"):
        write(lazy(x) * 1)


@pytest.mark.parametrize("room", [None, 3])
def test_labels_that_are_no_recorded_tensor_are_written_between_two_calls_that_take_them(room):
    model, (x, y) = mlp(), batch()

    def program(wrap):
        labels = y.clone()
        out = model(wrap(x))
        labels[out.argmax(1) == labels] = -100
        loss = F.cross_entropy(out, labels)
        loss.backward()
        return [loss.item(), *labels.tolist()]

    expected, found = assert_same_gradients(model, program, room)
    assert found == pytest.approx(expected, rel=1e-11)


USES = {
    "value": lambda t: t.value(),
    "call": lambda t: t + 1,
    "backward": lambda t: t.sum().backward(),
    "write": lambda t: t.mul_(2),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("of_view", [True, False])
def test_a_tensor_is_refused_after_a_write_into_another_one_in_its_memory(use, of_view):
    (x, _), text = batch(), "was used, and another one in the same memory was written"
    before = x.clone()
    for was_read in (True, False):
        a = lazy(x.clone().requires_grad_()) * 1
        view = a[:, :2]
        if was_read:
            assert view.sum().item() == x[:, :2].sum().item()
        written, other = (view, a) if of_view else (a, view)
        written.mul_(2)
        with pytest.raises(AdaptiveUsageError, match=text):
            use(other)
        torch.testing.assert_close(written.value(), (x[:, :2] if of_view else x) * 2)
    assert torch.equal(x, before)
