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
def test_a_write_through_a_view_reaches_the_batch_and_not_the_tensor_of_the_user(room):
    model, (x, _) = mlp(), batch()
    before = x.clone()

    def run(a):
        view = a[:, :2]
        view.mul_(3)
        loss = model(a).square().mean()
        loss.backward()
        return a.sum().item(), view.sum().item(), loss.item()

    expected, found = assert_same_gradients(
        model, lambda wrap: run(wrap(x.clone() if wrap is not lazy else x)), room
    )
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
@pytest.mark.parametrize("kind", ["masked_fill_", "setitem", "where out of a view", "a copy"])
def test_labels_that_are_ignored_from_some_point_on_are_not_counted(room, kind):
    model, (x, y) = mlp(), batch()

    def program(wrap):
        a, b = wrap(x, y.clone())
        if kind == "masked_fill_":
            b.masked_fill_(a[:, 0] > 0, -100)
        elif kind == "setitem":
            b[a[:, 0] > 0] = -100
        elif kind == "a copy":
            b = b.clone()
            b.masked_fill_(a[:, 0] > 0, -100)
        else:
            b.view(-1)[:].masked_fill_(a[:, 0] > 0, -100)
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


def test_a_write_that_would_not_reach_a_view_that_was_read_is_refused():
    (x, _), text = (
        batch(),
        r"mul_\(\) writes into a tensor of lazy\(\) that another one is a view of",
    )
    for of_view in (True, False):
        a = lazy(x)
        view = a[:, :2]
        before = view.sum().item(), view.value().clone()
        with pytest.raises(AdaptiveUsageError, match=text):
            (view if of_view else a).mul_(2)
        assert view.sum().item() == before[0]
        assert torch.equal(a.value(), x)


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
