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


def plain_gradients() -> list[list[float]]:
    model = layers()
    model(torch.arange(6.0).view(2, 3)).sum().backward()
    return gradients_of(model)


@pytest.fixture
def inputs() -> Tensor:
    return torch.arange(6.0).view(2, 3).requires_grad_()


class InScope(nn.Module):
    """A module with a scope of its own around another one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with NewDisposeScope("forward") as scope:
            return scope.move_to_outer(self.inner(x * 1))


# --- checkpoints


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_around_a_scope_recomputes_alike(inputs, use_reentrant):
    model = layers()
    checkpoint(InScope(model), inputs, use_reentrant=use_reentrant).sum().backward()
    assert gradients_of(model) == plain_gradients()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_inside_a_scope_recomputes_from_disposed_inputs(inputs, use_reentrant):
    model = layers()
    with NewDisposeScope() as scope:
        between = inputs * 1
        out = checkpoint(model, between, use_reentrant=use_reentrant)
        total = scope.move_to_outer(out.sum())
    assert is_disposed(between)
    assert is_disposed(out)
    total.backward()
    assert gradients_of(model) == plain_gradients()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_what_a_checkpoint_itself_makes_by_a_function_of_torch_is_the_scopes(use_reentrant):
    leaf = torch.ones(2, requires_grad=True)
    with NewDisposeScope():
        out = checkpoint(torch.sin, leaf, use_reentrant=use_reentrant)
    assert is_disposed(out)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_scopes_on_both_sides_of_a_checkpoint_and_around_backward(inputs, use_reentrant):
    model = layers()
    with NewDisposeScope("step"):
        x = inputs * 1
        out = checkpoint_sequential(InScope(model).inner, 2, x, use_reentrant=use_reentrant)
        checkpoint(InScope(nn.Identity()), out, use_reentrant=use_reentrant).sum().backward()
    assert gradients_of(model) == plain_gradients()


# --- orders of differentiation


def test_double_backward_through_disposed_first_gradients():
    leaf = torch.tensor([2.0, 3.0], requires_grad=True)
    with NewDisposeScope() as scope:
        cubes = leaf**3
        (first,) = torch.autograd.grad(cubes.sum(), leaf, create_graph=True)
        penalty = scope.move_to_outer((first**2).sum())
        scope.attach(first)
    assert is_disposed(cubes)
    assert is_disposed(first)
    penalty.backward()
    assert leaf.grad.tolist() == [288.0, 972.0]  # d/dx (3x^2)^2 = 36 x^3


def test_a_retained_graph_runs_twice_after_its_tensors_are_disposed():
    leaf = torch.tensor([2.0, 3.0], requires_grad=True)
    with NewDisposeScope() as scope:
        total = scope.move_to_outer((leaf.exp() * leaf).sum())
    total.backward(retain_graph=True)
    once = leaf.grad.clone()
    total.backward()
    assert torch.equal(leaf.grad, 2 * once)


@scoped
def polynomial(x: Tensor, y: Tensor) -> Tensor:
    product = x * y
    return (product.sin() + product**2).sum(-1)


def doubles(*shape: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_gradcheck_and_gradgradcheck_pass_through_a_scoped_function():
    operands = doubles(2, 3), doubles(3)
    assert torch.autograd.gradcheck(polynomial, operands, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(polynomial, operands)


def test_forward_mode_sees_through_a_scope():
    primal, tangent = doubles(3).detach(), torch.ones(3, dtype=torch.float64)
    with forward_ad.dual_level(), NewDisposeScope() as scope:
        dual = forward_ad.make_dual(primal, tangent)
        out = forward_ad.unpack_dual(polynomial(dual, primal))
        value, slope = scope.detach(out.primal, out.tangent)
    _, expected = torch.func.jvp(lambda x: polynomial(x, primal), (primal,), (tangent,))
    assert torch.equal(value, polynomial(primal, primal))
    assert torch.equal(slope, expected)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")  # as asked
@pytest.mark.filterwarnings("ignore:Error detected in SqrtBackward")  # the traceback of the forward
def test_anomaly_mode_finds_the_same_function_as_without_scopes():
    leaf = torch.zeros(1, requires_grad=True)
    with torch.autograd.detect_anomaly():
        with NewDisposeScope() as scope:
            bad = scope.move_to_outer((leaf.sqrt() * 0).sum())
        with pytest.raises(RuntimeError, match="'SqrtBackward0' returned nan values"):
            bad.backward()


def test_the_version_check_still_notices_a_changed_operand():
    leaf = torch.ones(2, requires_grad=True)
    with NewDisposeScope() as scope:
        operand = leaf * 1
        alias = scope.detach(operand.detach())
        total = scope.move_to_outer((operand**2).sum())
    alias.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


# --- hooks


def test_a_hook_on_a_disposed_tensor_fires_and_can_be_removed():
    leaf = torch.ones(2, requires_grad=True)
    seen: list[list[float]] = []
    with NewDisposeScope() as scope:
        middle = leaf * 2
        handle = middle.register_hook(lambda gradient: seen.append(gradient.tolist()))
        total = scope.move_to_outer((middle * 3).sum())
    total.backward(retain_graph=True)
    handle.remove()
    total.backward()
    assert seen == [[3.0, 3.0]]


def test_an_accumulation_hook_of_a_disposed_parameter_gets_a_parameter():
    parameter = nn.Parameter(torch.ones(2))
    seen: list[tuple[type, list[float]]] = []
    parameter.register_post_accumulate_grad_hook(
        lambda given: seen.append((type(given), given.grad.tolist()))
    )
    total = (parameter * 2).sum()
    dispose(parameter)
    total.backward()
    assert seen == [(nn.Parameter, [2.0, 2.0])]


def test_module_hooks_run_and_their_tensors_are_the_scopes(inputs):
    model, seen = layers(), []
    model[0].register_forward_pre_hook(lambda module, args: (args[0] * 1,))
    model[0].register_forward_hook(lambda module, args, out: out + 0)
    model[2].register_full_backward_hook(lambda module, given, out: seen.append(out[0].shape))
    with NewDisposeScope():
        model(inputs).sum().backward()
    assert seen == [(2, 4)]
    assert gradients_of(model) == plain_gradients()


def test_saved_tensors_moved_to_the_host_are_found_again(inputs):
    model = layers()
    with (
        NewDisposeScope() as scope,
        torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: tensor.detach().clone(), lambda packed: packed
        ),
    ):
        total = scope.move_to_outer(model(inputs).sum())
    total.backward()
    assert gradients_of(model) == plain_gradients()


def test_a_hook_that_packs_the_very_handle_fails_loudly():
    # save_on_cpu() of a tensor that is on the CPU keeps the handle itself
    leaf = torch.ones(2, requires_grad=True)
    with NewDisposeScope() as scope, save_on_cpu():
        middle = leaf * 2
        total = scope.move_to_outer((middle**2).sum())
    assert is_disposed(middle)
    with pytest.raises(DisposedTensorError, match=r"got float32\[2\] on cpu"):
        total.backward()


# --- custom functions


class KeepsAttribute(torch.autograd.Function):
    """Keeps its operand as an attribute, which autograd does not protect."""

    @staticmethod
    def forward(ctx, x):
        ctx.x = x
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.x * gradient


def test_an_operand_kept_as_an_attribute_of_ctx_fails_loudly():
    leaf = torch.ones(2, requires_grad=True)
    with NewDisposeScope("step") as scope:
        total = scope.move_to_outer(KeepsAttribute.apply(leaf * 1).sum())
    with pytest.raises(DisposedTensorError, match=r"mul\(\) got float32\[2\] on cpu"):
        total.backward()


def test_a_gradient_that_was_read_in_a_scope_is_still_the_gradient():
    leaf = torch.ones(2, requires_grad=True)
    with NewDisposeScope():
        (leaf * 2).sum().backward()
        held = leaf.grad
        held.mul_(3)
    assert leaf.grad is held
    assert held.tolist() == [6, 6]


def test_a_gradient_and_data_given_from_a_scope_stay():
    parameter = nn.Parameter(torch.zeros(2))
    with NewDisposeScope():
        parameter.grad = torch.ones(2) * 5
        parameter.data = torch.ones(2) * 7
    assert parameter.grad.tolist() == [5, 5]
    assert parameter.tolist() == [7, 7]


def test_backward_of_a_disposed_loss_is_refused():
    leaf = torch.ones(2, requires_grad=True)
    with NewDisposeScope("step"):
        loss = (leaf * 2).sum()
    with pytest.raises(DisposedTensorError, match=r"^backward\(\) got float32\[\] on cpu, 4 B"):
        loss.backward()
