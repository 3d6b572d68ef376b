"""Function transforms, tracers and compilers: a scope changes nothing they compute or capture."""

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.func import functionalize, grad, hessian, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from tenure import (
    DisposedTensorError,
    NewDisposeScope,
    attach_to_scope,
    current_scope,
    detach_from_scope,
    is_disposed,
    move_to_outer,
    scoped,
)

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def plain_function(x: Tensor) -> Tensor:
    squared = x * x
    return (squared.sin() + x.exp()).sum(-1)


scoped_function = scoped(plain_function)


def block_function(x: Tensor) -> Tensor:
    with NewDisposeScope("inside") as scope:
        squared = x * x
        return scope.move_to_outer((squared.sin() + x.exp()).sum(-1))


for_every_scoped_function = pytest.mark.parametrize("function", [scoped_function, block_function])


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(4, 3, dtype=torch.float64)


# --- torch.func

TRANSFORMS = {
    "vmap": vmap,
    "hessian": lambda f: vmap(hessian(f)),
    "vjp": lambda f: lambda x: vjp(f, x)[1](torch.ones(4, dtype=x.dtype)),
    "functionalize": functionalize,
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_a_transform_of_a_scoped_function_is_the_transform(transform, x):
    expected = transform(plain_function)(x)
    for function in (scoped_function, block_function):
        torch.testing.assert_close(transform(function)(x), expected, rtol=0, atol=0)
        with NewDisposeScope() as outer:
            inside = outer.detach(transform(function)(x))
        torch.testing.assert_close(inside, expected, rtol=0, atol=0)


# --- tracers


class Exported(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@for_every_scoped_function
def test_a_traced_or_exported_scoped_function_is_the_plain_one(function, x):
    def targets(f, mode):
        graph = make_fx(f, tracing_mode=mode)(x).graph
        return [node.target for node in graph.nodes if node.op == "call_function"]

    for mode in ("real", "fake"):
        assert targets(function, mode) == targets(plain_function, mode)
    traced = torch.jit.trace(function, x)
    with NewDisposeScope():
        program = torch.export.export(Exported(function), (x,))
    strict = torch.export.export(Exported(function), (x,), strict=True)
    for run in (traced, program.module(), strict.module()):
        assert torch.equal(run(x + 1), plain_function(x + 1))


# --- torch.compile


@for_every_scoped_function
def test_a_scope_inside_a_compiled_function_is_transparent(function, x):
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), plain_function(x))
    leaf = x.clone().requires_grad_()
    compiled(leaf).sum().backward()
    assert torch.equal(leaf.grad, grad(lambda x: plain_function(x).sum())(x))
    assert current_scope() is None


def test_a_buffer_that_a_compiled_module_assigns_outlives_the_scope(x):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("n_calls", torch.zeros(()))

        def forward(self, x):
            self.n_calls = self.n_calls + 1
            return x.exp()

    model = Counting()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for n in range(1, 4):
        with NewDisposeScope():
            compiled(x)
        assert model.n_calls == n


def test_a_function_compiles_twice_however_deep_the_scopes_around_it_are(x):
    counter = CompileCounter()
    compiled = torch.compile(scoped_function, backend=counter, fullgraph=True)

    def at_depth(depth: int) -> None:
        if depth == 0:
            assert torch.equal(compiled(x), plain_function(x))
            return
        with NewDisposeScope():
            at_depth(depth - 1)

    for depth in (*range(4), 11, 0):
        at_depth(depth)
    assert counter.frame_count == 2


def test_compiled_code_refuses_disposed_inputs_and_weights_and_goes_on(x):
    counter = CompileCounter()
    compiled = torch.compile(plain_function, backend=counter)
    model = nn.Linear(3, 2).double()
    compiled_model = torch.compile(model, backend="eager")
    compiled(x)
    compiled_model(x)
    with NewDisposeScope("step"):
        gone = x * 1
        attach_to_scope(model.weight)
        # what compiled code returns can be handed to a scope
        out = attach_to_scope(compiled(x))
        assert torch.equal(out, plain_function(x))
    assert is_disposed(out)
    for _ in range(3):
        with pytest.raises(DisposedTensorError, match=r"float64\[4, 3\] on cpu"):
            compiled(gone)
    with pytest.raises(DisposedTensorError, match=r"float64\[2, 3\] on cpu"):
        compiled_model(x)
    assert torch.equal(compiled(x), plain_function(x))
    assert counter.frame_count <= 2


def test_a_graph_break_inside_a_scope_keeps_the_scope_and_the_result(x):
    def broken(x: Tensor) -> list[Tensor]:
        with NewDisposeScope("broken") as scope:
            doubled = scope.move_to_outer(x * 2)
            torch._dynamo.graph_break()
            tripled, kept, lost = detach_from_scope(x * 3), x + 1, x + 2
            scope.dispose_everything_but(kept)
            return [doubled, tripled, move_to_outer(kept), lost]

    compiled = torch.compile(broken, backend="eager")
    for _ in range(3):  # the second call is the first to use what dynamo made of the first
        with NewDisposeScope() as outer:
            doubled, tripled, kept, lost = compiled(x)
            assert current_scope() is outer
            assert [t in outer for t in (tripled, kept)] == [False, True]
            assert torch.equal(doubled, x * 2)
            assert torch.equal(tripled, x * 3)
            assert torch.equal(kept, x + 1)
            assert is_disposed(lost)
    assert current_scope() is None
    assert torch.overrides._len_torch_function_stack() == 0
