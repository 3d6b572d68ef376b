import torch


def test_pinned_memory_is_a_copy_that_says_so(sim):
    plain = torch.arange(4)
    host = plain.pin_memory()
    assert host.is_pinned()
    assert host[1:3].is_pinned()
    assert not plain.is_pinned()
    assert torch.equal(host, plain)
    assert host.pin_memory() is host


def test_a_range_is_pinned_in_place_through_the_runtime(sim):
    runtime, host = sim.module.cudart(), torch.zeros(100)
    assert runtime.cudaHostRegister(host.data_ptr(), 200, 0) == 0
    assert host[:50].is_pinned()
    assert not host.is_pinned()
    assert runtime.cudaHostUnregister(host.data_ptr()) == 0
    assert not host[:50].is_pinned()


def test_a_data_loader_pins_its_batches(sim):
    data = torch.utils.data.TensorDataset(torch.ones(4, 2))
    loader = torch.utils.data.DataLoader(data, batch_size=2, pin_memory=True)
    assert all(batch.is_pinned() for (batch,) in loader)


def test_pinning_in_place_answers_with_the_codes_of_cuda(sim):
    runtime, host = sim.module.cudart(), torch.zeros(100)
    address, pinned = host.data_ptr(), torch.zeros(4).pin_memory()
    assert runtime.cudaHostRegister(address, 0, 0) == 1
    assert runtime.cudaHostUnregister(address) == 713
    assert runtime.cudaHostRegister(address, 400, 0) == 0
    assert runtime.cudaHostRegister(address + 8, 8, 0) == 712
    assert runtime.cudaHostUnregister(pinned.data_ptr()) == 713
    assert pinned.is_pinned()
