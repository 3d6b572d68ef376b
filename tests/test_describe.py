"""How a tensor is spelled, whatever kind of tensor it is."""

import pytest
import torch

from tenure._describe import describe, describe_tensor


class Tagged(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(func)


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(func)


def sparse(layout):
    return torch.eye(2).to_sparse(
        layout=layout, **({"blocksize": (1, 1)} if "bs" in str(layout) else {})
    )


def test_parts_of_a_tensor_that_is_gone():
    text = "float16[32, 1024] on cuda:0, 64.0 KiB"
    assert describe(torch.float16, (32, 1024), torch.device("cuda:0"), 65_536) == text


def test_scalar_has_empty_brackets():
    assert describe_tensor(torch.zeros(())) == "float32[] on cpu, 4 B"


def test_view_has_the_bytes_of_its_storage():
    assert describe_tensor(torch.zeros(1024)[:1]) == "float32[1] on cpu, 4.0 KiB"


def test_meta_tensor_shows_the_bytes_it_would_have():
    assert describe_tensor(torch.empty(8, device="meta")) == "float32[8] on meta, 32 B"


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr]
)
def test_sparse_tensor_has_no_storage_and_counts_its_elements(layout):
    assert describe_tensor(sparse(layout)) == "float32[2, 2] on cpu, 16 B"


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensor(layout):
    t = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    assert describe_tensor(t).startswith("float32[2")


def test_fake_tensor():
    with torch._subclasses.FakeTensorMode():
        t = torch.ones(3)
    assert describe_tensor(t) == "float32[3] on cpu, 12 B"


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_quantized_tensor():
    t = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    assert describe_tensor(t) == "qint8[3] on cpu, 3 B"


def test_subclasses_are_described_without_running_their_code():
    assert describe_tensor(torch.ones(3).as_subclass(Tagged)) == "float32[3] on cpu, 12 B"
    assert describe_tensor(Wrapper(torch.ones(3))) == "float32[3] on cpu, 12 B"


def test_parameter_without_a_shape_does_not_raise():
    assert describe_tensor(torch.nn.UninitializedParameter()).startswith("float32[")
