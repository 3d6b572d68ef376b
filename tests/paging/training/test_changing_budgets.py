"""Training within budgets that change, bit for bit as on the device whole."""

import copy
from itertools import chain

import pytest
import torch
from torch.nn import functional as F

from tenure.paging import page

from ..sharing.test_budget import bytes_of
from .blocks import inputs, transformer
from .conftest import same


def train(sim, model, batches, between=lambda number: None):
    """The losses and the gradients of some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for number, x in enumerate(batches):
        sim.module.manual_seed_all(number)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), torch.zeros_like(x))
        loss.backward()
        found.append([loss.detach().cpu(), *(p.grad.cpu().clone() for p in model.parameters())])
        optimizer.step()
        between(number)
    return found


def trained_whole(sim, model, batches):
    """The same of a copy on the device, and the most that it took beside its weights."""
    whole = copy.deepcopy(model).to(sim.device)
    sim.reset_peak()
    before_bytes = sim.allocated_bytes
    return train(sim, whole, batches), sim.peak_bytes - before_bytes


def assert_all_same(found, expected):
    pairs = zip(chain(*found), chain(*expected), strict=True)
    assert all(same(one, other) for one, other in pairs)


@pytest.mark.exhaustive
@pytest.mark.sim_allocator("exact")
def test_it_trains_in_what_others_leave_free(sim):
    torch.manual_seed(0)
    model, batches = transformer(), inputs(sim, 16)
    expected, needed_bytes = trained_whole(sim, model, batches)
    memory = sim.allocated_bytes + needed_bytes + bytes_of(model) // 2
    sim.budget_bytes = memory
    staying = []

    def between(number):
        staying.append(handle.report().resident_bytes)
        # For some steps another process has a part of what is free beside what a step needs.
        sim.budget_bytes = memory - (3 < number < 7) * bytes_of(model) // 4

    with page(model, sim.device, "36KiB", budget="auto", training=True) as handle:
        found = train(sim, model, batches, between)
    assert_all_same(found, expected)
    assert sim.n_ooms == 0
    assert min(staying[5:8]) < staying[4]
    assert min(staying[5:8]) < staying[-1]
