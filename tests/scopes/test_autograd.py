"""Autograd and scopes: what a graph needs stays, whatever is disposed before the backward pass."""

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tenure import DisposedTensorError, NewDisposeScope, dispose, is_disposed, scoped


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def gradients_of(model: nn.Module) -> list[list[float]]:
    return [parameter.grad.flatten().tolist() for parameter in model.parameters()]


@pytest.fixture
def inputs() -> Tensor:
    return torch.arange(6.0).view(2, 3).requires_grad_()


@pytest.fixture
def plain_gradients(inputs) -> list[list[float]]:
    model = layers()
    model(inputs).sum().backward()
    return gradients_of(model)


class InScope(nn.Module):
    """A module with a scope of its own around another one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with NewDisposeScope("forward") as scope:
            return scope.move_to_outer(self.inner(x * 1))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_recomputes_alike_around_a_scope_in_one_and_between(
    inputs, plain_gradients, use_reentrant
):
    around, inside, between = layers(), layers(), layers()
    checkpoint(InScope(around), inputs, use_reentrant=use_reentrant).sum().backward()
    with NewDisposeScope() as scope:
        given = inputs * 1
        out = checkpoint(inside, given, use_reentrant=use_reentrant)
        total = scope.move_to_outer(out.sum())
        made = checkpoint(torch.sin, inputs, use_reentrant=use_reentrant)
    assert all(map(is_disposed, (given, out, made)))
    total.backward()
    with NewDisposeScope("step"):
        out = checkpoint_sequential(between, 2, inputs * 1, use_reentrant=use_reentrant)
        checkpoint(InScope(nn.Identity()), out, use_reentrant=use_reentrant).sum().backward()
    for model in (around, inside, between):
        assert gradients_of(model) == plain_gradients


@scoped
def polynomial(x: Tensor, y: Tensor) -> Tensor:
    product = x * y
    return (product.sin() + product**2).sum(-1)


def doubles(*shape: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_gradcheck_gradgradcheck_and_forward_mode_pass_through_a_scoped_function():
    operands = doubles(2, 3), doubles(3)
    assert torch.autograd.gradcheck(polynomial, operands, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(polynomial, operands)
    primal, tangent = doubles(3).detach(), torch.ones(3, dtype=torch.float64)
    with forward_ad.dual_level(), NewDisposeScope() as scope:
        dual = forward_ad.make_dual(primal, tangent)
        value, slope = scope.detach(*forward_ad.unpack_dual(polynomial(dual, primal)))
    _, expected = torch.func.jvp(lambda x: polynomial(x, primal), (primal,), (tangent,))
    assert torch.equal(value, polynomial(primal, primal))
    assert torch.equal(slope, expected)


# --- hooks


def test_hooks_of_disposed_tensors_and_parameters_fire_and_can_be_removed():
    seen: list[object] = []
    parameter = nn.Parameter(torch.ones(2))
    parameter.register_post_accumulate_grad_hook(
        lambda given: seen.append((type(given), given.grad.tolist()))
    )
    with NewDisposeScope() as scope:
        middle = parameter * 2
        handle = middle.register_hook(lambda gradient: seen.append(gradient.tolist()))
        total = scope.move_to_outer((middle * 3).sum())
        dispose(parameter)
    total.backward(retain_graph=True)
    handle.remove()
    total.backward()
    assert seen == [[3.0, 3.0], (nn.Parameter, [6.0, 6.0]), (nn.Parameter, [12.0, 12.0])]


class KeepsAttribute(torch.autograd.Function):
    """Keeps its operand as an attribute, which autograd does not protect."""

    @staticmethod
    def forward(ctx, x):
        ctx.x = x
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.x * gradient


def test_what_keeps_the_very_handle_fails_loudly_in_backward():
    leaf = torch.ones(2, requires_grad=True)
    with NewDisposeScope("step") as scope:
        total = scope.move_to_outer(KeepsAttribute.apply(leaf * 1).sum())
        loss = total * 2
        # save_on_cpu() of a tensor that is on the CPU keeps the handle itself
        with save_on_cpu():
            squares = scope.move_to_outer(((leaf * 2) ** 2).sum())
    with pytest.raises(DisposedTensorError, match=r"^backward\(\) got float32\[\] on cpu, 4 B"):
        loss.backward()
    with pytest.raises(DisposedTensorError, match=r"mul\(\) got float32\[2\] on cpu"):
        total.backward()
    with pytest.raises(DisposedTensorError, match=r"got float32\[2\] on cpu"):
        squares.backward()


# --- gradients


def test_gradients_and_data_that_are_made_read_or_set_in_a_scope_stay():
    parameter = nn.Parameter(torch.zeros(2))
    leaf = torch.ones(2, requires_grad=True)
    with NewDisposeScope() as scope:
        (leaf * 2).sum().backward()
        held = leaf.grad
        held.mul_(3)
        assert held not in scope
        parameter.grad = torch.ones(2) * 5
        parameter.data = torch.ones(2) * 7
    assert leaf.grad is held
    assert held.tolist() == [6, 6]
    assert parameter.grad.tolist() == [5, 5]
    assert parameter.tolist() == [7, 7]
