import pytest
import torch

CUDA_FIGURES = {
    f"{name}.all.{figure}"
    for name in (
        "allocation",
        "allocated_bytes",
        "requested_bytes",
        "active",
        "active_bytes",
        "reserved_bytes",
        "segment",
    )
    for figure in ("current", "peak", "allocated", "freed")
}


def test_the_module_answers_what_devices_are_asked(sim):
    module = torch.get_device_module(sim.device)
    assert module is torch.sim
    assert module.is_available()
    assert module.is_initialized()
    assert module.device_count() == 1
    assert module.current_device() == 0
    assert module.get_device_name() == "simulated accelerator"
    module.set_device(0)
    with module.device(sim.device):
        assert module.current_device() == 0


def test_memory_stats_have_the_names_of_torch_cuda(sim):
    x = torch.empty(10, device=sim.device)
    stats = sim.module.memory_stats()
    assert stats.keys() >= CUDA_FIGURES | {"num_ooms", "num_alloc_retries", "num_device_alloc"}
    assert stats["allocated_bytes.all.current"] == x.nbytes
    assert stats["allocation.all.allocated"] == 1
    del x
    stats = sim.module.memory_stats()
    assert stats["allocated_bytes.all.freed"] == 40
    assert stats["allocated_bytes.all.peak"] == 40


def test_the_short_forms_agree_with_the_statistics(sim):
    sim(budget=1000)
    x = torch.empty(10, device=sim.device)
    module = sim.module
    assert module.memory_allocated(0) == module.memory_reserved("sim") == 40
    assert module.mem_get_info() == (960, 1000)
    del x
    assert module.max_memory_allocated(sim.device) == module.max_memory_reserved() == 40
    module.reset_peak_memory_stats()
    module.reset_accumulated_memory_stats()
    assert module.max_memory_allocated() == 0
    assert module.memory_stats()["allocation.all.allocated"] == 0


def test_without_a_budget_there_is_a_tebibyte(sim):
    assert sim.module.mem_get_info() == (1 << 40, 1 << 40)


def test_tensors_and_modules_have_the_methods_of_a_device(sim):
    assert torch.ones(2).sim().is_sim
    assert torch.nn.Linear(2, 2).sim().weight.device == sim.device


def test_another_device_is_refused(sim):
    for ask in (sim.module.set_device, sim.module.memory_stats, sim.module.device):
        with pytest.raises(ValueError, match="Expected a sim device, but got: cpu"):
            ask("cpu")


def test_waiting_for_all_streams_is_one_wait(sim):
    streams = [sim.module.Stream() for _ in range(3)]
    before = sim.host_waits
    sim.module.synchronize()
    assert sim.host_waits == before + 1
    assert all(stream.query() for stream in streams)


def test_bfloat16_is_supported_as_torch_cuda_is_asked_for_it(sim):
    assert sim.module.is_bf16_supported()
    assert sim.module.is_bf16_supported(including_emulation=False)
