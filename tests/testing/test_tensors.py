import torch


def test_factories_reach_the_device(sim):
    for make in (torch.zeros, torch.ones, torch.empty, torch.rand, torch.randn):
        assert make(2, 3, device="sim").device == sim.device
    assert torch.arange(3, device=sim.device).tolist() == [0, 1, 2]
    assert torch.tensor([1.5], device="sim:0").item() == 1.5
    assert torch.full((2,), 7, device=sim.device).tolist() == [7, 7]


def test_views_share_memory_and_allocate_nothing(sim):
    x = torch.zeros(4, 6, device=sim.device)
    count = sim.n_allocations
    views = [
        x.t(),
        x[1:3, ::2],
        x.view(-1),
        x.unfold(1, 2, 1),
        x.expand(2, 4, 6),
        x.view(torch.int32),
    ]
    assert sim.n_allocations == count
    x.fill_(1)
    assert all(bool(view.ne(0).all()) for view in views)


def test_channels_last_survives_the_way_there_and_back(sim):
    order = torch.channels_last
    image = torch.randn(2, 3, 4, 5).contiguous(memory_format=order)
    moved = image.to(sim.device)
    convolution = torch.nn.Conv2d(3, 4, 3).to(sim.device, memory_format=order)
    assert moved.is_contiguous(memory_format=order)
    assert convolution(moved).is_contiguous(memory_format=order)
    assert moved.cpu().is_contiguous(memory_format=order)
    assert torch.equal(moved.cpu(), image)
    assert torch.empty_like(moved).stride() == image.stride()


def test_resizing_in_place_grows_the_memory_and_keeps_the_values(sim):
    x = torch.arange(4.0, device=sim.device)
    x.resize_(8)
    assert sim.allocated_bytes == 32
    assert x[:4].tolist() == [0, 1, 2, 3]
    x.resize_(2, 1)
    assert x.shape == (2, 1)
    assert sim.allocated_bytes == 32


def test_set_shares_the_memory_of_another_tensor(sim):
    x, y = torch.zeros(4, device=sim.device), torch.empty(0, device=sim.device)
    y.set_(x.untyped_storage(), 1, (2,), (2,))
    y.fill_(5)
    assert x.tolist() == [0, 5, 0, 5]
    y.set_(x)
    assert y.shape == (4,)


def test_complex_numbers_conjugate_lazily(sim):
    values = torch.tensor([1 + 2j, 3 - 4j])
    conjugate = values.to(sim.device).conj()
    assert conjugate.is_conj()
    assert torch.equal((conjugate * 2j).cpu(), values.conj() * 2j)
    assert torch.equal(conjugate.cpu(), values.conj())
    assert torch.equal(conjugate.imag.cpu(), values.conj().imag)
