"""koila's own cases, and what it gets wrong: each against plain PyTorch.

Source: tests of koila 0.1.1, https://github.com/rentruewang/koila, by behaviour.
"""

import operator
from collections import UserDict, defaultdict

import numpy
import pytest
import torch

from tenure.adaptive import LazyTensor, lazy

from .programs import assert_same_gradients, batch, mlp

pytestmark = pytest.mark.usefixtures("forgetful")
A = torch.tensor([[0.3, -1.2, 2.0], [0.7, 0.1, 0.9]], dtype=torch.float64)
B = torch.tensor([[1.5, 0.4, -0.6], [2.5, 3.0, 0.2]], dtype=torch.float64)

_BINARY = "add sub mul truediv pow mod eq ne lt le gt ge floordiv matmul"


def _same(found, expected):
    assert isinstance(found, LazyTensor)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    torch.testing.assert_close(found.value(), expected, equal_nan=True)


@pytest.mark.parametrize("name", _BINARY.split())
def test_operators_of_recorded_and_plain_tensors_in_any_mix(name):
    apply, b = getattr(operator, name), B.T if name == "matmul" else B
    for left, right in ((lazy(A), lazy(b)), (lazy(A), b), (A, lazy(b))):
        _same(apply(left, right), apply(A, b))
    if name in ("add", "sub", "mul", "truediv", "pow", "floordiv", "mod"):
        _same(apply(lazy(B), 2), apply(B, 2))
        _same(apply(2.5, lazy(B)), apply(2.5, B))


def test_a_batch_of_one_sample_is_squeezed_as_a_plain_one():
    one = torch.ones(1, 3)
    _same(lazy(one).squeeze(), one.squeeze())


def test_other_things_come_back_as_they_are():
    assert lazy(None) is None
    assert lazy("text", 3) == ("text", 3)
    made = lazy({"x": A, "n": [B, 1]})
    assert isinstance(made["x"], LazyTensor)
    assert isinstance(made["n"][0], LazyTensor)
    made = lazy(UserDict(x=A), defaultdict(list, x=[A]))
    assert isinstance(made[0]["x"], LazyTensor)
    assert isinstance(made[1]["x"][0], LazyTensor)
    assert made[1]["y"] == []
    assert lazy(lazy(A), batch=0).shape == (2, 3)


@pytest.mark.parametrize("dim", [-1, numpy.int64(1)])
def test_the_batch_may_stand_in_any_dimension(dim):
    model, (x, _) = mlp(), batch()

    def program(wrap):
        recorded = wrap(x.T.contiguous()) if wrap is not lazy else lazy(x.T.contiguous(), batch=dim)
        model(recorded.transpose(0, 1)).square().mean().backward()

    assert_same_gradients(model, program, room=3)
