"""A parameter that is used outside of its model's forward: what works, and what the error says."""

import copy
import gc
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tenure.paging import page

from ..models import linears
from ..support import about_values

pytestmark = about_values

WIDTH = 16


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = linears(4, WIDTH)
        self.head = nn.Linear(WIDTH, 10, bias=False)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x):
        return self.body(x) * self.scale


@pytest.fixture
def net():
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
    gradients = [[p.grad for p in each.parameters()] for each in (net, plain)]
    torch.testing.assert_close(*gradients)


def direct(model, y):
    return F.linear(y, model.head.weight)


NAMED = "'head.weight', float32[10, 16] on cpu, 640 B, which was used"


def test_the_error_names_the_parameter_and_says_what_to_do(sim, net):
    net.requires_grad_(False)
    with pytest.raises(RuntimeError, match="two devices") as caught, page(net, sim.device):
        direct(net, net(draw(sim)))
    (note,) = caught.value.__notes__
    assert NAMED in note
    assert ".to('sim:0')" in note
    assert net(torch.zeros(1, WIDTH)).shape == (1, WIDTH)


def end_by_an_error(net, sim):
    try:
        direct(net, net(draw(sim)))
    except RuntimeError as error:
        sys.excepthook(type(error), error, error.__traceback__)


def test_an_error_that_ends_a_program_has_the_note_as_long_as_the_model_is_paged(sim, monkeypatch):
    told = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: told.append(error))
    for keeps_handle in (True, False):
        before, net = sys.excepthook, Net().requires_grad_(False)
        handle = page(net, sim.device)
        if not keeps_handle:
            del handle
            gc.collect()
        end_by_an_error(net, sim)
        assert NAMED in told.pop()[1].__notes__[0]
        if keeps_handle:
            handle.unpage()
        else:
            del net
            gc.collect()
        assert sys.excepthook is before


def after_unpage(net, handle, y):
    handle.unpage()
    direct(net, y)


@pytest.mark.parametrize(
    "use", [lambda net, handle, y: net.head.weight + torch.ones(3), after_unpage]
)
def test_errors_about_other_things_get_no_note(sim, net, use):
    net.requires_grad_(False)
    handle = page(net, sim.device)
    y = net(draw(sim))
    with pytest.raises(RuntimeError) as caught, handle:
        use(net, handle, y)
    assert not hasattr(caught.value, "__notes__")
