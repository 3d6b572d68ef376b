"""What is written in place: once, and behind the recording's back. (See also test_programs.)"""

import pytest
import torch

from tenure.adaptive import AdaptiveUsageError, lazy

from .programs import RoomFor, batch, gradients


def test_a_write_is_done_once_where_a_second_loss_starts_over(model, x):
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
def test_other_writes_through_a_view_of_a_recorded_tensor_are_refused(write, x):
    with pytest.raises(AdaptiveUsageError, match=r"Write by index, as in x\[:, 0\] \+= 1"):
        write(lazy(x) * 1)


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
