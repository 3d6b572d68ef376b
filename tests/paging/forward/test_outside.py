"""A parameter that is used outside of its model's forward: what works, and what the error says."""

import copy
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tenure.paging import PagingError, page

# about values and words, which no allocator changes: once, with the one that has more rules
pytestmark = pytest.mark.sim_allocator("cuda")

WIDTH = 16


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.head = nn.Linear(WIDTH, 10, bias=False)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x):
        return self.body(x) * self.scale


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


def draw(sim):
    return torch.randn(4, WIDTH, device=sim.device)


def loss_of(model, x, weight):
    logits = F.linear(model(x), weight)
    penalty = sum(p.square().sum() for p in model.parameters())
    return F.cross_entropy(logits, torch.arange(4, device=x.device)) + 0.1 * penalty


def test_a_copy_of_a_weight_and_a_penalty_over_all_give_the_gradients_of_the_plain_model(sim, net):
    plain, x = copy.deepcopy(net), draw(sim)
    loss_of(plain, x.cpu(), plain.head.weight).backward()
    with page(net, sim.device, 1, budget="6KiB", training=True):
        loss_of(net, x, net.head.weight.to(x.device)).backward()
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def direct(model, y):
    return F.linear(y, model.head.weight)


def through_a_function_of_torch(model, y):
    return F.cross_entropy(y, torch.zeros(4, dtype=torch.long, device=y.device), model.scale)


def by_a_variable(model, y):
    first = model.body[0].weight
    model.head.weight.sum()
    return torch.mm(y, first)


def from_a_list(model, y):
    weights = [model.body[0].weight, model.head.weight]
    return torch.stack([y[0], *weights[1]])


def in_a_loop(model, y):
    for parameter in model.parameters():
        y = y[:1] * parameter
    return y


def in_a_comprehension(model, y):
    return [y[:1] * parameter for parameter in model.parameters()]


its_variable_is_gone = pytest.mark.skipif(
    sys.version_info >= (3, 12),
    reason="from Python 3.12 on an error that leaves a comprehension has lost its variable",
)


def over_several_lines(model, y):
    return torch.addmm(
        y,
        y,
        model.body[1].weight,
    )


@pytest.mark.parametrize(
    ("use", "named"),
    [
        (direct, "'head.weight', float32[10, 16] on cpu, 640 B, "),
        (through_a_function_of_torch, "'scale', float32[16] on cpu, 64 B, "),
        (by_a_variable, "'body.0.weight', float32[16, 16] on cpu, 1.0 KiB, "),
        (from_a_list, "'body.0.weight', "),
        (in_a_loop, "'body.0.weight', "),
        pytest.param(in_a_comprehension, "'body.0.weight', ", marks=its_variable_is_gone),
        (over_several_lines, "'body.1.weight', "),
    ],
)
def test_the_error_names_the_parameter_and_says_what_to_do(sim, net, use, named):
    net.requires_grad_(False)
    with pytest.raises(PagingError) as caught, page(net, sim.device):
        use(net, net(draw(sim)))
    message = str(caught.value)
    assert message.startswith(named)
    assert "was used with tensors on sim:0 outside of the forward" in message
    assert ".to('sim:0')" in message
    assert "at least two devices" in str(caught.value.__cause__)
    assert net(torch.zeros(1, WIDTH)).shape == (1, WIDTH)


def test_a_parameter_that_was_read_before_the_model_was_paged_is_named_too(sim, net):
    net.requires_grad_(False)
    head = net.head.weight
    with pytest.raises(PagingError, match=r"^'head\.weight', "), page(net, sim.device):
        F.linear(draw(sim), head)


def other_tensors(model, y):
    for parameter in model.parameters():
        parameter.sum()
    return y + torch.ones(WIDTH)


def another_error(model, y):
    return model.head.weight + torch.ones(3)


@pytest.mark.parametrize("use", [other_tensors, another_error])
def test_errors_about_other_tensors_stay_as_they_are(sim, net, use):
    net.requires_grad_(False)
    with pytest.raises(RuntimeError) as caught, page(net, sim.device):
        use(net, net(draw(sim)))
    assert type(caught.value) is RuntimeError


def test_without_a_block_the_program_ends_with_the_explanation(sim, net, capsys, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    net.requires_grad_(False)
    handle = page(net, sim.device)
    y = net(draw(sim))
    with pytest.raises(RuntimeError) as caught:
        direct(net, y)
    sys.excepthook(caught.type, caught.value, caught.tb)
    with pytest.raises(RuntimeError) as other:
        other_tensors(net, y)
    sys.excepthook(other.type, other.value, other.tb)
    first, _, second = capsys.readouterr().err.partition("PagingError: 'head.weight'")
    assert "direct cause" in first
    assert "PagingError" not in second
    handle.unpage()
    assert sys.excepthook is sys.__excepthook__


def test_hooks_of_the_program_and_of_several_models_live_together(sim, net, monkeypatch):
    told = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, *_: told.append(kind))
    net.requires_grad_(False)
    for _ in range(2):
        first, second = page(net, sim.device), page(nn.Linear(2, 2), sim.device)
        before = sys.excepthook
        monkeypatch.setattr(sys, "excepthook", lambda *args, before=before: before(*args))
        y = net(draw(sim))
        with pytest.raises(RuntimeError) as caught:
            direct(net, y)
        sys.excepthook(caught.type, caught.value, caught.tb)
        first.unpage()
        sys.excepthook(caught.type, caught.value, caught.tb)
        second.unpage()
    assert told == [PagingError, RuntimeError] * 2


def unpage_and_use(handle, net, y):
    handle.unpage()
    direct(net, y)


def test_an_error_after_unpage_within_the_block_stays_as_it_is(sim, net):
    net.requires_grad_(False)
    handle = page(net, sim.device)
    y = net(draw(sim))
    with pytest.raises(RuntimeError) as caught, handle:
        unpage_and_use(handle, net, y)
    assert type(caught.value) is RuntimeError
