"""What is written in place: into a batch, through a view, and behind the recording's back."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tenure.adaptive import AdaptiveUsageError, lazy

from .programs import RoomFor, assert_same_gradients, batch, gradients, mlp

pytestmark = pytest.mark.usefixtures("forgetful")

ROOMS = pytest.mark.parametrize("room", [None, 3])


@ROOMS
def test_a_batch_written_in_place_is_that_batch_in_a_second_pass(room):
    model, (x, _) = mlp(), batch()
    before = x.clone()

    def program(wrap):
        a = wrap(x.clone())
        a.sub_(0.5).div_(0.1)
        model(a).square().mean().backward()
        first = gradients(model)
        model.zero_grad()
        # as SAM does
        model(a).square().mean().backward()
        return first, a.mean().item(), a[0, 0].item()

    (wanted, *numbers), (found, *others) = assert_same_gradients(model, program, room)
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-13)
    assert others == pytest.approx(numbers, rel=1e-12)
    assert torch.equal(x, before)


@ROOMS
def test_a_batch_written_in_place_is_read_as_it_is_by_a_loss_over_the_batch(room):
    model, (x, _) = mlp(), batch()

    def program(wrap):
        a = wrap(x.clone())
        a.mul_(3)
        loss = model(a).square().mean() * a.std() + (model(a) @ a[:, :3].t()).logsumexp(1).sum()
        loss.backward()
        return loss.item()

    expected, found = assert_same_gradients(model, program, room)
    assert found == pytest.approx(expected, rel=1e-11)


@ROOMS
def test_a_batch_written_in_place_is_read_as_it_is_where_no_gradient_is_wanted(room):
    model, (x, _) = mlp(), batch()

    def program(wrap):
        a = wrap(x.clone())
        a.mul_(3)
        with torch.no_grad():
            out = model(a)
        return out.sum().item(), a.sum().item(), a.mul_(2).sum().item(), model(a).sum().item()

    expected, found = assert_same_gradients(model, program, room)
    assert found == pytest.approx(expected, rel=1e-11)


@ROOMS
def test_a_view_that_nobody_uses_again_does_not_keep_what_it_is_of_from_being_written(room):
    """As masks of sliding windows do."""
    model, (x, _) = mlp(), batch()
    before = x.clone()

    def program(wrap):
        a = wrap(x.clone() if wrap is not lazy else x)
        view = a[:, :2]
        a[:, :2] = view.clamp(max=0)
        loss = model(a).square().mean()
        loss.backward()
        return a.sum().item(), loss.item()

    expected, found = assert_same_gradients(model, program, room)
    assert found == pytest.approx(expected, rel=1e-11)
    assert torch.equal(x, before)


def test_a_write_is_done_once_where_a_second_loss_starts_over():
    model, (x, _) = mlp(), batch()

    def program(wrap):
        a = wrap(x.clone())
        a.mul_(3)
        first, second = model(a).square().mean(), model(a).abs().mean()
        first.backward()
        with RoomFor(3):
            (second + model(a).mean()).backward()
        return a.sum().item()

    model.zero_grad()
    a = x * 3
    (model(a).square().mean() + model(a).abs().mean() + model(a).mean()).backward()
    wanted = gradients(model)
    model.zero_grad()
    assert program(lazy) == pytest.approx(a.sum().item(), rel=1e-12)
    torch.testing.assert_close(gradients(model), wanted, rtol=1e-11, atol=1e-13)


@ROOMS
@pytest.mark.parametrize("kind", ["rows", "columns", "shuffled labels"])
def test_what_is_made_of_the_batch_alone_is_written_into_it_before_it_is_split(room, kind):
    model, (x, y) = mlp(), batch()
    before = x.clone()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(2))

    def program(wrap):
        a, b = wrap(x, y)
        if wrap is not lazy:
            a = a.clone()
        # as CutMix does
        if kind == "rows":
            a[:, 1:3] = a[order, 1:3]
        elif kind == "columns":
            a -= a.mean(0)
            a[:, 0] = a[:, 0].flip(0)
            a.mul_(2)
        else:
            a[:, 1:3] = a[order, 1:3]
            b = b[order]
        loss = F.cross_entropy(model(a), b)
        loss.backward()
        return loss.item(), a.sum().item(), a[0, 1].item(), F.cross_entropy(model(a), b).item()

    expected, found = assert_same_gradients(model, program, room)
    assert found == pytest.approx(expected, rel=1e-11)
    assert torch.equal(x, before)


@ROOMS
@pytest.mark.parametrize("kind", ["masked_fill_", "setitem", "a copy"])
def test_labels_that_are_ignored_from_some_point_on_are_not_counted(room, kind):
    model, (x, y) = mlp(), batch()

    def program(wrap):
        a, b = wrap(x, y.clone())
        if kind == "masked_fill_":
            b.masked_fill_(a[:, 0] > 0, -100)
        elif kind == "setitem":
            b[a[:, 0] > 0] = -100
        else:
            b = b.clone()
            b.masked_fill_(a[:, 0] > 0, -100)
        loss = F.cross_entropy(model(a), b)
        loss.backward()
        return loss.item(), (b != -100).sum().item()

    expected, found = assert_same_gradients(model, program, room)
    assert found == pytest.approx(expected, rel=1e-11)


@ROOMS
def test_what_a_model_gave_and_was_written_into_the_batch_is_no_part_of_the_batch_alone(room):
    model, (x, _) = mlp(n_out=4), batch()

    def program(wrap):
        a = wrap(x.clone())
        a[:, 0] = model(a).detach()[:, 0]
        loss = (model(a) - a.mean(0)).square().mean()
        loss.backward()
        return loss.item()

    expected, found = assert_same_gradients(model, program, room)
    assert found == pytest.approx(expected, rel=1e-11)


@ROOMS
def test_a_view_that_is_written_by_index_is_assigned_where_it_is_from(room):
    model, (x, _) = mlp(), batch()

    def program(wrap):
        a = wrap(x.clone())
        a[:, 0] *= 2
        a[..., 2:4] -= a[:, :2]
        out = model(a)
        out[:, 1] *= 3
        before = out.sum().item()
        out[:, :2] += out.max().item()
        loss = (out * out.sum(1, keepdim=True)).square().mean()
        loss.backward()
        return before, loss.item(), out.sum().item(), a.sum().item()

    expected, found = assert_same_gradients(model, program, room)
    assert found == pytest.approx(expected, rel=1e-11)


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


def _a_view_that_was_assigned(a):
    index = (slice(None), 1)
    view = a[index]
    view *= 2
    a[index] = view
    a.add_(1)
    view.sum()


@pytest.mark.parametrize(
    "write",
    [_elsewhere, _another_view, _a_view_of_before, _a_view_that_was_assigned],
)
def test_other_writes_through_a_view_of_a_recorded_tensor_are_refused(write):
    x, _ = batch()
    with pytest.raises(AdaptiveUsageError, match=r"Write by index, as in x\[:, 0\] \+= 1"):
        write(lazy(x) * 1)


@ROOMS
def test_labels_that_are_no_recorded_tensor_are_written_between_two_calls_that_take_them(room):
    model, (x, y) = mlp(), batch()

    def program(wrap):
        labels, a = y.clone(), wrap(x.clone())
        out = model(a)
        labels[out.argmax(1) == labels] = -100
        loss = F.cross_entropy(out, labels)
        loss.backward()
        return loss.item(), labels.tolist()

    expected, found = assert_same_gradients(model, program, room)
    assert found == (pytest.approx(expected[0], rel=1e-11), expected[1])


USES = {
    "value": lambda t: t.value(),
    "item": lambda t: t.sum().item(),
    "call": lambda t: t + 1,
    "backward": lambda t: t.sum().backward(),
    "write": lambda t: t.mul_(2),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("of_view", [True, False])
@pytest.mark.parametrize("was_read", [True, False])
def test_a_tensor_is_refused_after_a_write_into_another_one_in_its_memory(use, of_view, was_read):
    (x, _), text = batch(), "was used, and another one in the same memory was written"
    before = x.clone()
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


def test_an_own_write_after_parameters_met_the_batch_is_no_write_of_data():
    model, (x, _), shift = mlp(), batch(), nn.Parameter(torch.ones(4, dtype=torch.float64))

    def program(wrap):
        shift.grad = None
        a = wrap(x.clone())
        a.add_(shift)
        loss = model(a - a.mean(0)).square().mean() + model(a).square().mean()
        loss.backward()
        return loss.item(), shift.grad.tolist()

    (loss, gradient), found = assert_same_gradients(model, program)
    assert found == (pytest.approx(loss, rel=1e-11), pytest.approx(gradient, rel=1e-11))


@pytest.mark.parametrize("read", ["value", "backward"])
def test_a_parameter_that_got_other_memory_since_is_refused(read):
    model, (x, _) = nn.Linear(4, 3), batch()
    loss = model(lazy(x.float())).sum()
    model.weight.data = torch.zeros(3, 4)
    with pytest.raises(AdaptiveUsageError, match=r"float32\[3, 4\].* was written to after"):
        getattr(loss, read)()
    assert model.weight.grad is None
