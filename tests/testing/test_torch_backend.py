import pytest
import torch

from tenure._torch.storages import key_of
from tenure.testing import _torch_backend as backend

pytestmark = pytest.mark.usefixtures("sim")


def host_bytes(n_bytes):
    return torch.arange(n_bytes, dtype=torch.uint8).untyped_storage()


def test_the_device_type_is_registered_under_its_name_and_number():
    assert torch._C._get_privateuse1_backend_name() == backend.DEVICE_TYPE
    stream = torch.Stream(stream_id=5, device_index=0, device_type=backend.DEVICE_TYPE_NUMBER)
    assert stream.device == backend.sim_device()


def test_a_storage_over_host_bytes_lies_on_the_device_at_the_same_address():
    host = host_bytes(8)
    storage = backend.storage_over(host, 8)
    assert storage.device == backend.sim_device()
    assert storage.data_ptr() == host.data_ptr()
    assert storage.nbytes() == 8


def test_a_tensor_over_a_storage_has_the_geometry_it_was_given():
    host = host_bytes(16)
    storage = backend.storage_over(host, 16)
    tensor = backend.tensor_over(storage, torch.int16, (2, 2), (1, 2), 3)
    assert tensor.dtype == torch.int16
    assert (tensor.shape, tensor.stride(), tensor.storage_offset()) == ((2, 2), (1, 2), 3)
    assert backend.tensor_key(tensor) == key_of(storage)


def test_required_elements_counts_to_the_last_element():
    assert backend.required_elements((2, 3), (3, 1)) == 6
    assert backend.required_elements((2, 3), (10, 1)) == 13
    assert backend.required_elements((0, 3), (3, 1)) == 0


def test_operators_are_found_by_name_with_and_without_overload():
    assert backend.operator_named("mm") is torch.ops.aten.mm.default
    assert backend.operator_named("add.Tensor") is torch.ops.aten.add.Tensor


def test_below_autocast_an_operator_keeps_its_types(sim):
    x = torch.ones(2, 2, device=sim.device)
    with torch.autocast("sim", dtype=torch.bfloat16), backend.below_autocast():
        assert (x @ x).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.float64, torch.complex32])
def test_a_tensor_is_made_on_the_device_of_its_storage(dtype):
    host = host_bytes(32)
    storage = backend.storage_over(host, 32, index=1)
    tensor = backend.tensor_over(storage, dtype, (2,), (1,), 0)
    assert (tensor.device, tensor.dtype, tensor.shape) == (backend.sim_device(1), dtype, (2,))
    assert tensor.data_ptr() == host.data_ptr()
