"""What watches or transforms a forward sees the model's operations, and none of the pager's."""

import copy

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tenure.paging import PagingError, page

from ..models import WIDTH, mlp


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.seen.append(str(operation))
        return operation(*args, **(kwargs or {}))


def operations_of(model, x):
    with Operations() as operations, torch.no_grad():
        model(x)
    return operations.seen


@pytest.fixture
def whole():
    return mlp().eval()


@pytest.fixture
def model(whole, tmp_path):
    model = copy.deepcopy(whole)
    with page(model, "cpu", "5KiB", budget="10KiB", host=tmp_path):
        yield model


def test_a_dispatch_mode_sees_what_it_sees_of_the_whole_model(model, whole, x):
    assert [operations_of(model, x) for _ in range(3)] == [operations_of(whole, x)] * 3


def test_fake_tensors_go_through_and_leave_no_trace(model, whole, x):
    with torch.no_grad():
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            assert model(fake.from_tensor(x)).shape == (4, WIDTH)
        assert all(model(x).equal(whole(x)) for _ in range(3))


def test_the_transforms_of_torch_func_give_what_they_give_of_the_whole_model(model, whole, x):
    with torch.no_grad():
        for _ in range(2):
            assert torch.vmap(model)(x).allclose(torch.vmap(whole)(x))
        tangents = [torch.func.jvp(each, (x,), (x,))[1] for each in (model, whole)]
    assert tangents[0].allclose(tangents[1])


def test_a_trace_by_torch_jit_is_refused_and_the_model_goes_on(model, whole, x):
    with torch.no_grad():
        with pytest.raises(PagingError, match=r"is traced by torch\.jit while it is paged"):
            torch.jit.trace(model, x)
        assert model(x).equal(whole(x))
