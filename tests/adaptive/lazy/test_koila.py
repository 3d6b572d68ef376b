"""koila's own cases, and what it gets wrong: each against plain PyTorch.

Source: tests of koila 0.1.1, https://github.com/rentruewang/koila, by behaviour.
"""

import math
import operator
from collections import UserDict, defaultdict

import numpy
import pytest
import torch
from torch import nn

from tenure.adaptive import LazyTensor, lazy

from .programs import assert_same_gradients, batch, mlp

pytestmark = pytest.mark.usefixtures("forgetful")
A = torch.tensor([[0.3, -1.2, 2.0], [0.7, 0.1, 0.9]], dtype=torch.float64)
B = torch.tensor([[1.5, 0.4, -0.6], [2.5, 3.0, 0.2]], dtype=torch.float64)

_BINARY = "add sub mul truediv pow mod eq ne lt le gt ge floordiv matmul"
_METHODS = "abs exp log sigmoid atanh neg min max t mean sum std flatten"


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


@pytest.mark.parametrize("name", _METHODS.split())
def test_functions_and_methods(name):
    _same(getattr(lazy(B), name)(), getattr(B, name)())
    _same(getattr(torch, name)(lazy(B)), getattr(torch, name)(B))


SHAPES = {
    "transpose": lambda x: x.transpose(1, 2),
    "view by size": lambda x: x.view(x.size(0) * 3, 2),
    "split": lambda x: x.split(2, 1)[1],
    "bfloat16": lambda x: x.bfloat16() + 1,
    "len": lambda x: x * len(x),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes_are_known_and_right(shape):
    x = torch.randn(4, 3, 2, dtype=torch.float64)
    _same(shape(lazy(x)), shape(x))


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


LAYERS = {
    "BatchNorm2d": (nn.BatchNorm2d(3), (4, 3, 6, 6)),
    "Conv2d": (nn.Conv2d(4, 4, 3, groups=2), (4, 4, 8, 8)),
    "attention": (nn.TransformerEncoderLayer(8, 2, 16, 0.0), (5, 4, 8)),
    "GRU": (nn.GRU(6, 5), (3, 4, 6)),
    "Embedding": (nn.Embedding(9, 4), (4, 3)),
}


@pytest.mark.parametrize(("layer", "shape"), LAYERS.values(), ids=LAYERS)
def test_layers(layer, shape):
    layer = layer.double()
    is_embedding = isinstance(layer, nn.Embedding)
    x = torch.randint(9, shape) if is_embedding else torch.randn(shape, dtype=torch.float64)
    expected, found = layer(x), layer(lazy(x))
    pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
    for mine, theirs in pairs:
        _same(mine, theirs)


def test_the_models_of_its_tutorial():
    """Batches of 9 that leave a single sample over, and a loss that is a mean."""
    torch.manual_seed(0)
    layers = nn.Flatten(), nn.Linear(784, 48), nn.ReLU(), nn.Linear(48, 10)
    model = nn.Sequential(*layers).double()
    x, y = torch.randn(9, 28, 28, dtype=torch.float64), torch.randint(0, 10, (9,))

    def program(wrap):
        loss = nn.CrossEntropyLoss()(model(wrap(x)), wrap(y))
        loss.backward()
        return loss.item()

    for room in (8, 4, 2):
        expected, found = assert_same_gradients(model, program, room)
        assert math.isclose(expected, found, rel_tol=1e-12)
