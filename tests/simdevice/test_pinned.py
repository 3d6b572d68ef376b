import torch


def test_pinned_memory_is_a_copy_that_says_so(sim):
    plain = torch.arange(4)
    host = plain.pin_memory()
    assert host.is_pinned()
    assert host[1:3].is_pinned()
    assert not plain.is_pinned()
    assert torch.equal(host, plain)
    assert host.pin_memory() is host


def test_memory_is_unpinned_when_it_dies(sim):
    host = torch.zeros(1 << 16).pin_memory()
    address = host.data_ptr()
    del host
    from ._pinned import pinned_memory

    assert address not in pinned_memory._ranges


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
