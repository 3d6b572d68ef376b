"""The module of the device, and what `torch.accelerator` answers with it."""

import pytest
import torch

CUDA_FIGURES = {
    f"{name}.all.{figure}"
    for name in (
        *("allocation", "allocated_bytes", "requested_bytes", "active", "active_bytes"),
        *("reserved_bytes", "segment"),
    )
    for figure in ("current", "peak", "allocated", "freed")
}


def test_module_and_accelerator_answer_what_devices_are_asked(sim):
    module = torch.get_device_module(sim.device)
    assert module is torch.sim
    assert module.is_available()
    assert module.is_initialized()
    assert module.is_bf16_supported(including_emulation=False)
    assert module.get_device_name() == "simulated accelerator"
    with module.device(sim.device):
        assert module.current_device() == 0
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator().type == "sim"
    for each in (module, torch.accelerator):
        assert each.device_count() == 1
    with torch.accelerator.device_index(0):
        assert torch.accelerator.current_device_index() == 0
    for ask in (module.set_device, module.memory_stats, module.device):
        with pytest.raises(ValueError, match="Expected a sim device, but got: cpu"):
            ask("cpu")


@pytest.mark.sim_allocator("exact")
def test_memory_is_told_with_the_names_of_torch_cuda(sim):
    assert sim.module.mem_get_info() == (1 << 40, 1 << 40)  # without a budget
    sim(budget=1000)
    module, x = sim.module, torch.zeros(100, device=sim.device)
    stats = module.memory_stats()
    assert stats.keys() >= CUDA_FIGURES | {"num_ooms", "num_alloc_retries", "num_device_alloc"}
    assert stats["allocated_bytes.all.current"] == x.nbytes
    assert stats["allocation.all.allocated"] == 1
    assert module.memory_allocated(0) == module.memory_reserved("sim") == 400
    assert torch.accelerator.memory_allocated() == torch.accelerator.memory_reserved() == 400
    assert module.mem_get_info() == torch.accelerator.get_memory_info() == (600, 1000)
    assert torch.accelerator.memory_stats() == dict(sorted(module.memory_stats().items()))
    del x
    assert module.memory_stats()["allocated_bytes.all.freed"] == 400
    assert module.max_memory_allocated(sim.device) == torch.accelerator.max_memory_reserved() == 400
    module.reset_peak_memory_stats()
    torch.accelerator.reset_accumulated_memory_stats()
    assert module.max_memory_allocated() == module.memory_stats()["allocation.all.allocated"] == 0


def test_tensors_and_modules_have_the_methods_of_a_device(sim):
    assert torch.ones(2).sim().is_sim
    assert torch.nn.Linear(2, 2).sim().weight.device == sim.device


def test_streams_are_those_of_the_device_and_one_wait_is_for_all(sim):
    streams = [sim.module.Stream() for _ in range(3)]
    assert torch.accelerator.current_stream() is sim.module.default_stream()
    torch.accelerator.set_stream(streams[0])
    assert sim.module.current_stream() is streams[0]
    torch.accelerator.set_stream(sim.module.default_stream())
    torch.zeros(1000, device=sim.device)
    before = sim.host_waits
    torch.accelerator.synchronize()
    assert sim.host_waits == before + 1
    assert all(stream.query() for stream in (*streams, sim.module.current_stream()))
