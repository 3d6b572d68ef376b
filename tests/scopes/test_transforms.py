"""Function transforms, tracers and compilers: a scope changes nothing they compute or capture."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.func import functionalize, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from tenure import (
    DisposedTensorError,
    NewDisposeScope,
    attach_to_scope,
    current_scope,
    detach_from_scope,
    is_disposed,
    move_to_outer,
    persist,
    scoped,
)
from tests.compiling import forget_compiled

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def plain_function(x: Tensor) -> Tensor:
    squared = x * x
    return (squared.sin() + x.exp()).sum(-1)


scoped_function = scoped(plain_function)


def block_function(x: Tensor) -> Tensor:
    with NewDisposeScope("inside") as scope:
        squared = x * x
        return scope.move_to_outer((squared.sin() + x.exp()).sum(-1))


def free_verbs(x: Tensor) -> Tensor:
    with NewDisposeScope():
        result = move_to_outer(plain_function(x))
    return result + 0


SCOPED = {"@scoped": scoped_function, "with": block_function, "free verbs": free_verbs}
for_every_scoped_function = pytest.mark.parametrize("function", SCOPED.values(), ids=SCOPED)


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(4, 3, dtype=torch.float64)


# --- torch.func

TRANSFORMS = {
    "vmap": vmap,
    "grad": lambda f: grad(lambda x: f(x).sum()),
    "vmap(grad)": lambda f: vmap(grad(f)),
    "jacrev": jacrev,
    "jacfwd": jacfwd,
    "hessian": lambda f: vmap(hessian(f)),
    "jvp": lambda f: lambda x: jvp(f, (x,), (torch.ones_like(x),)),
    "vjp": lambda f: lambda x: vjp(f, x)[1](torch.ones(4, dtype=x.dtype)),
    "functionalize": functionalize,
    "vmap(vmap)": lambda f: vmap(vmap(lambda x: f(x[None]))),
}


@for_every_scoped_function
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_a_transform_of_a_scoped_function_is_the_transform(transform, function, x):
    expected = transform(plain_function)(x)
    torch.testing.assert_close(transform(function)(x), expected, rtol=0, atol=0)
    with NewDisposeScope() as outer:
        inside = outer.detach(transform(function)(x))
    torch.testing.assert_close(inside, expected, rtol=0, atol=0)


def test_a_pullback_holds_the_output_and_so_is_made_in_persist_to_outlive_a_scope(x):
    cotangent = torch.ones(4, dtype=torch.float64)
    (expected,) = vjp(plain_function, x)[1](cotangent)
    with NewDisposeScope("forward"):
        _, lost = vjp(plain_function, x)
        with persist():
            _, kept = vjp(plain_function, x)
    assert torch.equal(kept(cotangent)[0], expected)
    with pytest.raises(DisposedTensorError, match="<DisposeScope 'forward'>"):
        lost(cotangent)


def test_a_transformed_function_that_returns_a_disposed_tensor_is_refused(x):
    def careless(row: Tensor) -> Tensor:
        with NewDisposeScope("careless"):
            return row * 2

    with pytest.raises(DisposedTensorError, match="<DisposeScope 'careless'>"):
        vmap(careless)(x)


# --- tracers


@for_every_scoped_function
def test_a_traced_scoped_function_computes_the_same(function, x):
    traced = torch.jit.trace(function, x)
    assert torch.equal(traced(x + 1), plain_function(x + 1))


@for_every_scoped_function
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_captures_the_graph_of_the_plain_function(function, mode, x):
    def targets(f):
        graph = make_fx(f, tracing_mode=mode)(x).graph
        return [node.target for node in graph.nodes if node.op == "call_function"]

    extra = [torch.ops.aten.add.Tensor] if function is free_verbs else []
    assert targets(function) == targets(plain_function) + extra


class Exported(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@for_every_scoped_function
@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
def test_an_exported_scoped_function_computes_the_same(function, strict, x):
    program = torch.export.export(Exported(function), (x,), strict=strict)
    assert torch.equal(program.module()(x + 1), plain_function(x + 1))


def test_exporting_inside_a_scope_captures_the_same_program(x):
    outside = torch.export.export(Exported(plain_function), (x,))
    with NewDisposeScope():
        inside = torch.export.export(Exported(plain_function), (x,))
    assert inside.graph_module.code == outside.graph_module.code
    assert torch.equal(inside.module()(x), plain_function(x))


# --- torch.compile


@pytest.mark.slow
@for_every_scoped_function
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_scope_inside_a_compiled_function_is_transparent(function, backend, x):
    compiled = torch.compile(function, backend=backend, fullgraph=True)
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
    compiled = torch.compile(plain_function, backend=counter)

    def at_depth(depth: int) -> None:
        if depth == 0:
            assert torch.equal(compiled(x), plain_function(x))
            return
        with NewDisposeScope():
            at_depth(depth - 1)

    for depth in [*range(12), *range(12)]:
        at_depth(depth)
    assert counter.frame_count == 2


def test_a_function_with_a_scope_compiles_twice_however_deep_the_scopes_around_it_are(x):
    counter = CompileCounter()
    compiled = torch.compile(block_function, backend=counter, fullgraph=True)
    with NewDisposeScope(), NewDisposeScope(), NewDisposeScope():
        compiled(x)
        with NewDisposeScope():
            compiled(x)
    for _ in range(3):
        compiled(x)
    assert counter.frame_count == 2


def test_a_compiled_model_trains_alike_in_scopes():
    def run(opener) -> list[Tensor]:
        torch.manual_seed(0)
        forget_compiled()
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))
        compiled = torch.compile(model, backend="aot_eager")
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            with opener():
                compiled(torch.randn(5, 3)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return list(model.state_dict().values())

    for expected, actual in zip(run(nullcontext), run(NewDisposeScope), strict=True):
        assert torch.equal(expected, actual)


def test_a_compiled_function_refuses_a_disposed_input_and_goes_on(x):
    counter = CompileCounter()
    compiled = torch.compile(plain_function, backend=counter)
    compiled(x)
    with NewDisposeScope("step"):
        gone = x * 1
    for _ in range(3):
        with pytest.raises(DisposedTensorError, match=r"float64\[4, 3\] on cpu"):
            compiled(gone)
    assert torch.equal(compiled(x), plain_function(x))
    assert counter.frame_count <= 2


def test_a_compiled_module_refuses_a_disposed_weight(x):
    model = nn.Linear(3, 2).double()
    compiled = torch.compile(model, backend="eager")
    compiled(x)
    with NewDisposeScope("step"):
        attach_to_scope(model.weight)
    assert is_disposed(model.weight)
    with pytest.raises(DisposedTensorError, match=r"float64\[2, 3\] on cpu"):
        compiled(x)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_outputs_of_compiled_code_can_be_handed_to_a_scope(backend, x):
    compiled = torch.compile(plain_function, backend=backend)
    with NewDisposeScope():
        out = attach_to_scope(compiled(x))
        assert torch.equal(out, plain_function(x))
    assert is_disposed(out)


def test_a_graph_break_inside_a_scope_keeps_the_scope_and_the_result(x):
    def broken(x: Tensor) -> Tensor:
        with NewDisposeScope("broken") as scope:
            doubled = x * 2
            torch._dynamo.graph_break()
            return scope.move_to_outer(doubled + 1)

    compiled = torch.compile(broken, backend="eager")
    for _ in range(3):  # the second call is the first to use what dynamo made of the first
        assert torch.equal(compiled(x), x * 2 + 1)
        with NewDisposeScope() as outer:
            made = compiled(x)
            assert current_scope() is outer
            assert made in outer
            assert torch.equal(outer.detach(made), x * 2 + 1)
    assert current_scope() is None
    assert torch.overrides._len_torch_function_stack() == 0


def test_verbs_take_effect_in_a_frame_that_dynamo_gave_up_on(x):
    def broken(x: Tensor) -> list[Tensor]:
        with NewDisposeScope("broken") as scope:
            torch._dynamo.graph_break()
            tripled, kept, lost = detach_from_scope(x * 3), x + 1, x + 2
            scope.dispose_everything_but(kept)
            return [tripled, move_to_outer(kept), lost]

    compiled = torch.compile(broken, backend="eager")
    for _ in range(3):
        tripled, kept, lost = compiled(x)
        assert torch.equal(tripled, x * 3)
        assert torch.equal(kept, x + 1)
        assert is_disposed(lost)


def test_a_conditional_is_captured_inside_a_scope(x):
    def pick(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))

    with NewDisposeScope() as scope:
        picked = scope.detach(torch.compile(pick, backend="eager", fullgraph=True)(x))
    assert torch.equal(picked, x + 1 if x.sum() > 0 else x - 1)
