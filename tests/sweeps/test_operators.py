"""PyTorch's own operator database, run inside scopes.

Two promises are held against every operator: letting handles go changes no value and no gradient,
bit for bit, and a scope takes exactly the tensors that a call made. What can't be held is left out
by name, and a test holds that each name belongs there.
"""

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_leaves

from tenure import NewDisposeScope, is_disposed

from .samples import samples_of, tensors_in

DTYPES = (torch.float64, torch.float32, torch.complex128, torch.int64, torch.float8_e4m3fn)
LEFT_OUT = {
    # run on CUDA only, though their dtypes claim the CPU
    "jiterator_unary", "jiterator_binary", "jiterator_4inputs_with_extra_args",
    "jiterator_binary_return_by_ref", "jiterator_2inputs_2outputs",
    # reads beside its operand, where a copy of that may have no memory
    "as_strided.partial_views",
}  # fmt: skip

Call = Callable[..., Any]


def name_of(op: OpInfo) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def dtype_of(op: OpInfo) -> torch.dtype | None:
    return next((dtype for dtype in DTYPES if dtype in op.dtypes), None)


def is_differentiable(op: OpInfo) -> bool:
    return op.supports_autograd and dtype_of(op) in (torch.float64, torch.float32)


RUNNING = [op for op in op_db if dtype_of(op) and name_of(op) not in LEFT_OUT]
DIFFERENTIABLE = [op for op in RUNNING if is_differentiable(op)]
SAMPLES = 6
few_or_all = pytest.mark.parametrize(
    "n_samples", [1, pytest.param(SAMPLES, marks=pytest.mark.exhaustive)]
)
# What the operators warn of (beta, deprecation, defaults) is the same with a scope and without.
pytestmark = pytest.mark.filterwarnings("ignore")


def samples(ops: list[OpInfo], n_samples: int) -> Iterator[tuple[OpInfo, SampleInput]]:
    for op in ops:
        for sample in samples_of(op, dtype_of(op), n_samples, grad=is_differentiable(op)):
            yield op, sample


# --- the two promises


@pytest.mark.usefixtures("nothing_uninitialized")
@few_or_all
def test_values_are_the_same_inside_a_scope(n_samples):
    for op, sample in samples(RUNNING, n_samples):
        expected = bits_of(run(op, copy_of(sample)))
        with NewDisposeScope():
            actual = bits_of(run(op, copy_of(sample)))
        assert actual == expected, (name_of(op), sample)


@pytest.mark.usefixtures("nothing_uninitialized")
@few_or_all
def test_gradients_are_the_same_with_every_handle_disposed_before_backward(n_samples):
    for op, sample in samples(DIFFERENTIABLE, n_samples):
        for call in differentiable_ways_to_call(op, sample):
            expected = backward(forward(call, copy_of(sample), []))

            handles: list[Tensor] = []
            with NewDisposeScope() as scope:
                graph = forward(call, copy_of(sample), handles)
                sizes = [handle.numel() * handle.itemsize for handle in scope.owned()]
            assert all(map(is_disposed, handles))
            scribbles = [torch.full((n_bytes,), 0xA5, dtype=torch.uint8) for n_bytes in sizes]

            assert backward(graph) == expected, (name_of(op), call, sample)
            del scribbles


@few_or_all
def test_a_scope_takes_exactly_what_the_call_made(n_samples, census):
    for op, sample in samples(RUNNING, n_samples):
        calls = [call for call in ways_to_call(op, sample) if not refuses(call, copy_of(sample))]
        inputs = [copy_of(sample) for _ in calls]
        existing = census()
        for call, given in zip(calls, inputs, strict=True):
            with NewDisposeScope() as scope:
                made = [out for out in tensors_in(run(call, given)) if id(out) not in existing]
                owned = scope.owned()
                told = name_of(op), call, sample
                assert not [tensor for tensor in owned if id(tensor) in existing], told
                assert not [tensor for tensor in made if tensor not in scope], told


# --- the rules by which cases were left out


def test_what_is_left_out_by_name_does_not_run_here():
    left_out = [op for op in op_db if name_of(op) in LEFT_OUT]
    assert len(left_out) == len(LEFT_OUT)
    for op in left_out:
        with pytest.raises((AssertionError, RuntimeError), match=r"CUDA and ROCm|out of bounds"):
            bits_of([run(op, copy_of(sample)) for _, sample in samples([op], SAMPLES)])
    # five have no dtype on the CPU, or float8
    assert len(op_db) - len(RUNNING) <= len(LEFT_OUT) + 5
    assert len(RUNNING) > 680
    assert len(DIFFERENTIABLE) > 480


# --- calls


def copy_of(sample: SampleInput) -> SampleInput:
    """The same values in leaves that nothing else holds."""
    return sample.transform(
        lambda x: x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
    )


def run(call: Call, sample: SampleInput) -> Any:
    torch.manual_seed(1)
    return call(sample.input, *sample.args, **sample.kwargs)


def refuses(call: Call, sample: SampleInput) -> bool:
    """Whether plain torch has no such call: no such method of these operands, or no such out=."""
    try:
        run(call, sample)
    except (RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError):
        return True
    return False


def ways_to_call(op: OpInfo, sample: SampleInput) -> Iterator[Call]:
    yield op
    variants = [op.method_variant, op.operator_variant, *(alias.op for alias in op.aliases)]
    inplace = [op.inplace_variant, op.inplace_operator_variant]
    yield from filter(None, variants)
    if not sample.broadcasts_input:
        yield from (without_grad(variant) for variant in inplace if variant)
    if op.supports_out:
        yield without_grad(partial(into_out, op))


def differentiable_ways_to_call(op: OpInfo, sample: SampleInput) -> Iterator[Call]:
    def in_place_on_a_copy(x, *args, **kwargs):
        return op.inplace_variant(x.clone(), *args, **kwargs)

    yield op
    if op.inplace_variant and op.supports_inplace_autograd and not sample.broadcasts_input:
        yield in_place_on_a_copy


def without_grad(call: Call) -> Call:
    return torch.no_grad()(call)


def into_out(op: OpInfo, *args: Any, **kwargs: Any) -> Any:
    out = op(*args, **kwargs)
    spare = (
        torch.empty_like(out) if isinstance(out, Tensor) else type(out)(map(torch.empty_like, out))
    )
    return op(*args, **kwargs, out=spare)


# --- graphs


class Graph(NamedTuple):
    """What is kept of a forward pass: no tensor, only edges into its graph."""

    roots: list[GradientEdge]
    leaves: list[GradientEdge]
    outputs: list[tuple[torch.Size, torch.dtype]]


def forward(call: Call, sample: SampleInput, handles: list[Tensor]) -> Graph:
    result = run(call, sample)
    outs = [out for out in tensors_in(sample.output_process_fn_grad(result)) if out.requires_grad]
    handles += [*inputs_of(sample), *tensors_in(result), *outs]
    leaves = [leaf for leaf in inputs_of(sample) if leaf.requires_grad]
    return Graph(
        [get_gradient_edge(out) for out in outs],
        [GradientEdge(*leaf.clone().grad_fn.next_functions[0]) for leaf in leaves],
        [(out.shape, out.dtype) for out in outs],
    )


def backward(graph: Graph) -> list[object]:
    torch.manual_seed(2)
    cotangents = [torch.randn(shape, dtype=dtype) for shape, dtype in graph.outputs]
    if not graph.roots:
        return []
    return bits_of(torch.autograd.grad(graph.roots, graph.leaves, cotangents, allow_unused=True))


# --- tensors


def inputs_of(sample: SampleInput) -> list[Tensor]:
    return tensors_in((sample.input, sample.args, sample.kwargs))


def bits_of(tree: object) -> list[object]:
    """All of a result that can be compared, down to the last bit."""
    return [bits(leaf) if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(tree)]


def bits(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    plain = torch.empty(dense.numel(), dtype=dense.dtype).copy_(dense.reshape(-1))
    return tensor.dtype, tuple(tensor.shape), plain.view(torch.uint8).numpy().tobytes()


@pytest.fixture
def nothing_uninitialized() -> Iterator[None]:
    """Let torch fill new memory: empty() returns it, linalg.lstsq() takes its pivots from it."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def census() -> Callable[[], dict[int, Tensor]]:
    """Count all tensors that exist, by identity; what existed before the module is counted once."""
    gc.unfreeze()
    gc.collect()
    elders = tensors_among(gc.get_objects())
    gc.freeze()
    return lambda: {id(tensor): tensor for tensor in elders + tensors_among(gc.get_objects())}


def tensors_among(objects: list[Any]) -> list[Tensor]:
    return [thing for thing in objects if issubclass(type(thing), Tensor)]
