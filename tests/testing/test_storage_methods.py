import copy
import io
import pickle

import pytest
import torch
from torch import nn


def saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


@pytest.fixture
def model(sim):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(sim.device)


def assert_same(state, model, device_type):
    assert {tensor.device.type for tensor in state.values()} == {device_type}
    for name, tensor in model.state_dict().items():
        assert torch.equal(state[name].cpu(), tensor.cpu())


def test_a_state_dict_of_the_device_loads_back_on_either_side(model):
    file = saved(model.state_dict())
    assert_same(torch.load(file), model, "sim")
    file.seek(0)
    assert_same(torch.load(file, map_location="cpu"), model, "cpu")


def test_a_state_dict_of_the_host_loads_onto_the_device(sim, model):
    host = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    for place in ("sim", {"cpu": "sim:0"}):
        assert_same(torch.load(saved(host), map_location=place), model, "sim")
    fresh = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(sim.device)
    fresh.load_state_dict(host)
    assert_same(fresh.state_dict(), model, "sim")
    assert_same(pickle.loads(pickle.dumps(model.state_dict())), model, "sim")


def test_a_deep_copy_is_accounted_and_shares_nothing(sim, model):
    n_bytes = sim.allocated_bytes
    twin = copy.deepcopy(model)
    assert sim.allocated_bytes == 2 * n_bytes
    with torch.no_grad():
        twin[0].weight.zero_()
    assert model[0].weight.abs().sum() > 0


def test_a_deep_copy_keeps_shared_storages_shared(sim):
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


def test_a_refilled_storage_is_the_same_one_with_undefined_bytes(sim):
    x = torch.ones(4, device=sim.device)
    storage = x.untyped_storage()
    key = storage._cdata
    assert storage.resize_(0).resize_(16) is storage
    assert (storage.nbytes(), storage.size(), storage._cdata) == (16, 16, key)
    assert sim.allocated_bytes == 16
    assert x.isnan().all()
    x[1:].fill_(3)
    assert x[1:].tolist() == [3, 3, 3]
    del x, storage
    assert sim.allocated_bytes == 0


def test_a_refilled_storage_belongs_to_the_stream_of_the_refill(sim):
    x, side = torch.ones(4, device=sim.device), sim.module.Stream()
    x.untyped_storage().resize_(0)
    with sim.module.stream(side):
        x.untyped_storage().resize_(16)
    (segment,) = sim.module.memory_snapshot()
    assert segment["stream"] == side.stream_id
    assert segment["address"] == x.data_ptr()
    assert sim.module.ExternalStream(segment["stream"]) is side


def test_emptying_a_storage_in_use_on_another_stream_is_a_race(sim):
    x, side = torch.ones(4, device=sim.device), sim.module.Stream()
    side.wait_stream(sim.module.current_stream())
    with sim.module.stream(side):
        x.sum()
    x.untyped_storage().resize_(0)
    (fault,) = sim.take_faults()
    assert "was freed while stream" in fault
