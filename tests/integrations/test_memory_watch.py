"""What trainers log of memory: growth, what outlives its step, retries.

The watch is private, because the callbacks of three libraries make it; here none has to train.
"""

import logging

import pytest
import torch

from tenure.integrations._memory_watch import MemoryWatch

ALWAYS = float("inf")


@pytest.fixture
def watch():
    watch = MemoryWatch(share=ALWAYS)
    watch.begin()
    return watch


def test_what_outlives_its_step_is_counted_and_the_largest_is_named_once(watch, caplog):
    history = []
    with caplog.at_level(logging.WARNING, "tenure.memory"):
        for n in range(15):
            history.append(torch.ones(8 + n))
            watch.step_ended()
    # those from step 2 to step 13
    assert watch.figures()["memory/outlived_tensors"] == 12
    assert watch.figures()["memory/outlived_bytes"] == 4 * sum(range(9, 21))
    (record,) = caplog.records
    assert "history grew by 6 tensors, " in record.message
    assert "from step 1 to step 7" in record.message


def test_parameters_and_the_state_of_an_optimizer_are_meant_to_stay(watch):
    model = torch.nn.Linear(4, 4)
    for n in range(10):
        if n == 4:
            optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 4)).sum().backward()
        if n >= 4:
            optimizer.step()
        watch.step_ended()
        if n == 7:
            assert len(optimizer.state) == 2
            assert watch.figures()["memory/outlived_tensors"] == 0
    assert watch.figures()["memory/outlived_tensors"] == 0


def test_growth_is_that_of_the_time_since_the_figures_were_asked_for(watch):
    kept = []
    watch.step_ended()
    before = watch.figures()
    assert "memory/growth_bytes" not in before
    kept.append(torch.ones(1000))
    for _ in range(3):
        watch.step_ended()
    figures = watch.figures()
    assert figures["memory/growth_bytes"] == 4000
    assert figures["memory/allocated_bytes"] == before["memory/allocated_bytes"] + 4000
    # nobody has looked since
    assert "memory/allocated_bytes" not in watch.figures()


def test_an_error_of_memory_gets_a_note_of_what_holds_it_and_any_other_none(watch, caplog):
    history = []
    for _ in range(4):
        # larger than what other tests have left in this process
        history.append(torch.ones(2**22))
        watch.step_ended()
    error = torch.OutOfMemoryError("CUDA out of memory.")
    text = watch.died(error)
    assert error.__notes__ == [text]
    first, *rows = text.splitlines()
    assert first.startswith("tenure: ")
    assert "other tensors" in first
    assert any("history[" in row and "16.0 MiB: " in row for row in rows)
    assert "grew by 3 tensors, 48.0 MiB" in text
    assert [record.message for record in caplog.records] == [text]
    other = ValueError("no")
    assert watch.died(other) is None
    assert not hasattr(other, "__notes__")


@pytest.mark.simdevice
def test_the_allocator_of_a_device_is_asked(sim):
    watch = MemoryWatch()
    watch.begin("sim")
    kept = [torch.ones(1000, device="sim")]
    assert watch.figures()["memory/allocated_bytes"] == torch.sim.memory_allocated()
    kept.append(torch.ones(1000, device="sim"))
    assert watch.figures()["memory/growth_bytes"] > 0
