import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch


def test_device_and_host_draw_from_sequences_of_their_own(sim):
    torch.manual_seed(3)
    torch.rand(4, device=sim.device)
    host = torch.rand(4)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(4), host)


def test_a_saved_state_brings_back_the_same_dropout(sim):
    x = torch.ones(64, device=sim.device)
    state = sim.module.get_rng_state()
    first = torch.nn.functional.dropout(x)
    assert not torch.equal(torch.nn.functional.dropout(x), first)
    sim.module.set_rng_state(state)
    assert torch.equal(torch.nn.functional.dropout(x), first)


def test_a_failed_operation_draws_nothing(sim):
    torch.manual_seed(3)
    expected = torch.nn.functional.dropout(torch.ones(64, device=sim.device))
    torch.manual_seed(3)
    x = torch.ones(64, device=sim.device)
    sim.fail_at(1)
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        torch.nn.functional.dropout(x)
    assert torch.equal(torch.nn.functional.dropout(x), expected)


def yielding(run):
    def run_and_let_other_threads_run(*args):
        run(*args)
        time.sleep(0.0001)

    return run_and_let_other_threads_run


def test_threads_that_draw_on_the_device_leave_the_state_of_the_host_alone(sim, monkeypatch):
    monkeypatch.setattr(torch, "set_rng_state", yielding(torch.set_rng_state))
    before = torch.get_rng_state()

    def draw():
        for _ in range(20):
            torch.randn(10, device=sim.device)

    with ThreadPoolExecutor(4) as executor:
        for task in [executor.submit(draw) for _ in range(4)]:
            task.result()
    assert torch.equal(torch.get_rng_state(), before)
