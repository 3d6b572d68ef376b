"""Tensors and storages of the device do what those of CUDA do."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

MIXED = (
    "Expected all tensors to be on the same device, but found at least two devices, sim:0 and cpu!"
)


def test_values_survive_the_way_there_and_back_in_every_type_and_convert_on_it(sim):
    for dtype in (torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64):
        x = torch.tensor([0, 1, 1]).to(dtype)
        assert torch.equal(x.to(sim.device).cpu(), x)
    x = torch.tensor([1.5, 2.5]).to(sim.device, torch.float16)
    assert (x.dtype, x.device) == (torch.float16, sim.device)
    assert x.to("cpu", torch.int64).tolist() == [1, 2]
    assert x.to(torch.float32).device == sim.device


def test_views_share_memory_and_allocate_nothing(sim):
    x = torch.zeros(4, 6, device=sim.device)
    count = sim.n_allocations
    views = [x.t(), x[1:3, ::2], x.view(-1), x.unfold(1, 2, 1), x.expand(2, 4, 6)]
    views += [x.view(torch.int32), torch.ops.aten.split_with_sizes(x, [1, 3])[0]]
    assert sim.n_allocations == count
    x.fill_(1)
    assert all(bool(view.ne(0).all()) for view in views)


def test_channels_last_survives_the_way_there_and_back(sim):
    order = torch.channels_last
    image = torch.randn(2, 3, 4, 5).contiguous(memory_format=order)
    moved = image.to(sim.device)
    convolution = nn.Conv2d(3, 4, 3).to(sim.device, memory_format=order)
    assert moved.is_contiguous(memory_format=order)
    assert convolution(moved).is_contiguous(memory_format=order)
    assert moved.cpu().is_contiguous(memory_format=order)
    assert torch.equal(moved.cpu(), image)
    assert torch.empty_like(moved).stride() == image.stride()


def test_in_place_operations_return_the_same_object_and_allocate_nothing(sim):
    x = torch.ones(4, device=sim.device)
    figures = sim.n_allocations, x._version + 1
    assert x.mul_(2) is x
    assert x.tolist() == [2, 2, 2, 2]
    assert (sim.n_allocations, x._version) == figures


def test_resizing_in_place_keeps_the_values_and_set_shares_the_memory_of_another(sim):
    x, y = torch.arange(4.0, device=sim.device), torch.empty(0, device=sim.device)
    for shape in ((8,), (2, 1)):
        x.resize_(*shape)
        assert (x.shape, sim.allocated_bytes) == (shape, 32)
    y.set_(x.untyped_storage(), 1, (2,), (2,))
    y.fill_(5)
    assert x.resize_(4).tolist() == [0, 5, 2, 5]
    y.set_(x)
    assert y.shape == (4,)


def test_complex_numbers_conjugate_lazily(sim):
    values = torch.tensor([1 + 2j, 3 - 4j])
    conjugate = values.to(sim.device).conj()
    assert conjugate.is_conj()
    assert torch.equal((conjugate * 2j).cpu(), values.conj() * 2j)
    assert torch.equal(conjugate.cpu(), values.conj())
    assert torch.equal(conjugate.imag.cpu(), values.conj().imag)


@pytest.mark.parametrize(
    "mix",
    [
        lambda host, device: host + device,
        lambda host, device: torch.cat([host, device]),
        lambda host, device: device.add_(host),
        lambda host, device: host + device.sum(),
        lambda host, device: torch.std(device, (0, 1), out=host[0, 0]),
    ],
)
def test_mixing_devices_raises_as_on_cuda(sim, mix):
    with pytest.raises(RuntimeError, match=MIXED):
        mix(torch.ones(2, 2), torch.ones(2, 2, device=sim.device))


def test_a_number_of_the_host_may_take_part_and_an_argument_that_may_not_is_named(sim):
    x = torch.ones(2, device=sim.device)
    assert (torch.tensor(2.0) + x).tolist() == [3, 3]
    assert (x * torch.tensor(3)).device == sim.device
    assert (x.half().sum() * 2.5).dtype == torch.float16
    with pytest.raises(RuntimeError, match=r"checking argument mat2 in method aten::mm\)"):
        x[None].mm(torch.ones(2, 2))


def test_indices_may_lie_on_the_host_but_not_the_other_way_round(sim):
    x = torch.arange(4.0, device=sim.device)
    assert x[torch.tensor([3, 1])].tolist() == [3, 1]
    x[torch.tensor([True, False, False, True])] = 9
    assert x.tolist() == [9, 1, 2, 9]
    with pytest.raises(RuntimeError, match="indices should be either on cpu or on the same device"):
        torch.arange(4)[torch.tensor([1], device=sim.device)]


@pytest.fixture
def model(sim):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(sim.device)


def assert_same(state, model, device_type):
    assert {tensor.device.type for tensor in state.values()} == {device_type}
    for name, tensor in model.state_dict().items():
        assert torch.equal(state[name].cpu(), tensor.cpu())


@pytest.mark.parametrize("saved_on", ["sim", "cpu"])
@pytest.mark.parametrize(
    ("place", "found_on"), [(None, None), ("cpu", "cpu"), ("sim", "sim"), ({"cpu": "sim:0"}, "sim")]
)
def test_a_state_dict_loads_back_on_either_side(model, saved_on, place, found_on):
    file = io.BytesIO()
    torch.save({name: each.to(saved_on) for name, each in model.state_dict().items()}, file)
    file.seek(0)
    assert_same(torch.load(file, map_location=place), model, found_on or saved_on)


def test_a_module_loads_a_state_of_the_host_and_pickles(sim, model):
    fresh = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(sim.device)
    fresh.load_state_dict({name: each.cpu() for name, each in model.state_dict().items()})
    for state in (fresh.state_dict(), pickle.loads(pickle.dumps(model.state_dict()))):
        assert_same(state, model, "sim")


def test_a_deep_copy_is_accounted_and_shares_only_what_was_shared(sim, model):
    n_bytes = sim.allocated_bytes
    twin = copy.deepcopy(model)
    assert sim.allocated_bytes == 2 * n_bytes
    with torch.no_grad():
        twin[0].weight.zero_()
    assert model[0].weight.abs().sum() > 0
    x = torch.zeros(4, device=sim.device)
    first, second = copy.deepcopy([x, x[2:]])
    first.fill_(1)
    assert second.tolist() == [1, 1]


def test_a_storage_is_made_on_the_device_and_copied_to_the_host(sim):
    storage = torch.UntypedStorage(16, device=sim.device)
    assert storage.device == sim.device
    assert sim.allocated_bytes == 16
    assert torch.zeros(4, device=sim.device).untyped_storage().cpu().tolist() == [0] * 16
    assert torch.UntypedStorage(16).device.type == "cpu"


def test_an_emptied_storage_is_freed_and_every_use_of_it_is_loud(sim):
    x = torch.ones(4, device=sim.device)
    view = x[2:]
    assert x.untyped_storage().resizable()
    assert x.untyped_storage().resize_(0).nbytes() == 0
    assert sim.allocated_bytes == 0
    for use, used in ((torch.neg, x), (torch.zero_, view), (torch.Tensor.cpu, x)):
        with pytest.raises(RuntimeError, match=r"illegal memory access: .* resized to 0 bytes"):
            use(used)
    x.untyped_storage().resize_(0)  # a second time changes nothing
    del x, view, used
    assert sim.allocated_bytes == 0


def test_a_refilled_storage_is_the_same_one_with_undefined_bytes_on_the_stream_of_the_refill(sim):
    x, side = torch.ones(4, device=sim.device), sim.module.Stream()
    storage = x.untyped_storage()
    key = storage._cdata
    with sim.module.stream(side):
        assert storage.resize_(0).resize_(16) is storage
        assert (storage.nbytes(), storage.size(), storage._cdata) == (16, 16, key)
        assert sim.allocated_bytes == 16
        (segment,) = sim.module.memory_snapshot()
        assert (segment["stream"], segment["address"]) == (side.stream_id, x.data_ptr())
        assert sim.module.ExternalStream(segment["stream"]) is side
        assert x.isnan().all()
        x[1:].fill_(3)
        assert x[1:].tolist() == [3, 3, 3]
    del x, storage
    assert sim.allocated_bytes == 0
