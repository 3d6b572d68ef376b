"""Tensors that come with a graph of their own, computed beside the batch or from it."""

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor

from tenure.adaptive import AdaptiveUsageError, lazy

from ..unchanged import unchanged
from .programs import ROOMS, WIDE, RoomFor, Vision, assert_same, batch, gradients, mlp


def _piled(model, x, y):
    """Pile up what a model gives in a tensor that is plain, as mixtures of experts do."""
    _, positions, scale = model.beside()
    hidden = model.inner(x * positions[0])
    piled = torch.zeros(8, 4, dtype=torch.float64)
    for chosen in (y == 0, y != 0):
        piled.index_add_(0, chosen.nonzero()[:, 0], hidden[chosen] * scale)
    (piled + hidden).square().mean().backward()


def test_what_is_piled_up_in_a_plain_tensor_gets_its_gradients_or_is_refused():
    model, (x, y) = Vision(), batch()
    assert_same(model, lambda wrap: _piled(model, *wrap(x, y)))
    with RoomFor(3), pytest.raises(AdaptiveUsageError, match=r"index_add_\(\) writes what has a"):
        _piled(model, *lazy(x, y))
    assert gradients(model) == {}


class RoomBackward(RoomFor):
    """A backward pass through more rows than so many runs out of memory."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        backward = func is torch.ops.aten.mm.default and args[0].shape[-1] == WIDE
        if backward and not isinstance(args[0], FakeTensor) and args[0].shape[0] > self._most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return func(*args, **(kwargs or {}))


def test_a_retry_runs_such_a_graph_once():
    model, (x, _) = mlp(n_out=4), batch()
    scale = nn.Parameter(torch.randn(4, dtype=torch.float64))
    seen = []

    def program(wrap):
        scale.grad = None
        out = model(wrap(x.clone().requires_grad_()))
        # it has run, so that the graph of the scale runs backward before memory runs out
        assert out.sum().item() != 0
        factor = scale.exp()
        factor.register_hook(lambda gradient: seen.append(gradient.clone()))
        (out * factor).square().mean().backward()
        return scale.grad.clone()

    expected = program(lambda x: x)
    wanted = gradients(model)
    model.zero_grad()
    with RoomBackward(3):
        found = program(lazy)
    torch.testing.assert_close([found, gradients(model)], [expected, wanted])
    assert len(seen) == 2
    torch.testing.assert_close(*seen)


class _Fails(torch.autograd.Function):
    error = ValueError

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        raise _Fails.error("out of memory")


@ROOMS
@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_where_such_a_graph_fails_no_gradient_is_delivered(room, kind, monkeypatch):
    model, (x, _) = Vision(), batch()
    monkeypatch.setattr(_Fails, "error", kind)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    expected = AdaptiveUsageError if kind is torch.OutOfMemoryError else kind
    with unchanged(model), RoomFor(3 * (room or 8)), pytest.raises(expected, match="emory"):
        (model(lazy(x)) * _Fails.apply(model.scale.exp())).square().mean().backward()


@ROOMS
def test_hooks_see_whole_gradients_once(room):
    model, (x, _) = Vision(), batch()
    seen = []

    def program(wrap):
        token, positions, scale = model.beside()
        # the scale is reached by itself too
        handles = [
            each.register_hook(lambda gradient: seen.append(gradient.clone()) or gradient * 2)
            for each in (token, positions, scale, model.scale, model.token)
        ]
        (model(wrap(x), (token, positions, scale)) * model.scale).square().mean().backward()
        for handle in handles:
            handle.remove()

    assert_same(model, program, room and 3 * room)
    assert len(seen) == 10
    for found in seen[5:]:
        assert any(found.shape == each.shape and torch.allclose(found, each) for each in seen[:5])
