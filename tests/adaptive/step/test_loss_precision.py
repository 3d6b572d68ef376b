"""Weights are computed in float64 where the device has it.

A private answer is forgotten before each test, because a process asks each device once.
"""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tenure.adaptive import step
from tenure.adaptive._step import _loss
from tenure.adaptive._step._loss import widest_float


@pytest.fixture
def meta():
    """A device that nothing is known of."""
    _loss._has_float64.cache_clear()
    yield torch.device("meta")
    _loss._has_float64.cache_clear()


class Refusing(TorchFunctionMode):
    """Fails where float64 is made."""

    def __init__(self, error):
        super().__init__()
        self.error = error
        self.n_asked = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.float64 in (*args, *kwargs.values()):
            self.n_asked += 1
            raise self.error
        return func(*args, **kwargs)


def test_the_cpu_has_float64_without_being_asked():
    with Refusing(TypeError("no float64")) as mode:
        assert widest_float(torch.device("cpu")) is torch.float64
        assert widest_float(torch.device("cuda:1")) is torch.float64
    assert mode.n_asked == 0


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Required aspect fp64 is not supported on the device"),
        TypeError("Cannot convert a MPS Tensor to float64 dtype"),
    ],
)
def test_another_device_is_asked_once(meta, error):
    with Refusing(error) as mode:
        assert [widest_float(meta) for _ in range(3)] == [torch.float32] * 3
    assert mode.n_asked == 1


def test_another_device_that_has_float64_uses_it(meta):
    assert widest_float(meta) is torch.float64


def test_a_device_without_memory_is_asked_again(meta):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    with Refusing(error), pytest.raises(torch.OutOfMemoryError):
        widest_float(meta)
    assert widest_float(meta) is torch.float64


def test_a_weight_that_is_known_late_needs_no_float64(meta):
    net = torch.nn.Linear(4, 1, device=meta)
    batch = torch.ones(9, 4, device=meta)
    with Refusing(RuntimeError("Required aspect fp64 is not supported on the device")) as mode:
        step(lambda b: (net(b).sum(), torch.tensor(len(b), device=meta)), batch, maximum=4)
    assert net.weight.grad.shape == (1, 4)
    assert mode.n_asked == 1
