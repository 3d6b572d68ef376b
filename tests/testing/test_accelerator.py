import pytest
import torch


def test_the_accelerator_of_the_process_is_the_simulated_one(sim):
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator().type == "sim"
    assert torch.accelerator.device_count() == 1
    assert torch.accelerator.current_device_index() == 0
    torch.accelerator.set_device_index(0)
    with torch.accelerator.device_index(0):
        assert torch.accelerator.current_device_index() == 0


def test_memory_is_answered_with_the_figures_of_the_device(sim):
    sim(budget=1000)
    x = torch.zeros(100, device=sim.device)
    assert torch.accelerator.memory_allocated() == 400
    assert torch.accelerator.memory_reserved() == 400
    assert torch.accelerator.get_memory_info() == (600, 1000)
    assert torch.accelerator.memory_stats() == dict(sorted(sim.module.memory_stats().items()))
    del x
    assert torch.accelerator.max_memory_allocated() == 400
    assert torch.accelerator.max_memory_reserved() == 400
    torch.accelerator.reset_peak_memory_stats()
    torch.accelerator.reset_accumulated_memory_stats()
    torch.accelerator.empty_cache()
    assert torch.accelerator.max_memory_allocated() == 0


def test_streams_are_answered_with_those_of_the_device(sim):
    side = sim.module.Stream()
    assert torch.accelerator.current_stream() is sim.module.default_stream()
    torch.accelerator.set_stream(side)
    assert sim.module.current_stream() is side
    torch.accelerator.set_stream(sim.module.default_stream())
    torch.zeros(1000, device=sim.device)
    torch.accelerator.synchronize()
    assert sim.module.current_stream().query()


def test_what_stays_unanswered_raises(sim):
    with pytest.raises(RuntimeError, match="doesn't support getting device capabilities"):
        torch.accelerator.get_device_capability()
    with pytest.raises(NotImplementedError, match="getPinnedMemoryAllocator"):
        torch.empty(1, pin_memory=True)
