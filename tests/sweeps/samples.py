"""The samples that torch tests an operator with.

`OpInfo.sample_inputs` looks for the test that asks, in `inspect.stack()`: among the thousands of
modules of a process that has imported a trainer or two that takes longer than any test, twice.
"""

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_leaves

_SEED = 0


def samples_of(op: OpInfo, dtype: torch.dtype, n: int, *, grad: bool) -> Iterator[SampleInput]:
    """The first samples of an operator on the CPU, the same ones in every run.

    Args:
        op: the operator.
        dtype: of its tensors.
        n: how many, if there are so many.
        grad: whether they require gradients.
    """
    torch.default_generator.manual_seed(_SEED)
    return islice(op.sample_inputs_func(op, "cpu", dtype, requires_grad=grad), n)


def tensors_in(tree: object) -> list[Tensor]:
    """The tensors of a sample or a result."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def gradients_of(results: object, inputs: object) -> list[Tensor | None]:
    """The gradients of ones for the leaves among the inputs, as far as there are any."""
    ends = [tensor for tensor in tensors_in(results) if tensor.requires_grad]
    leaves = [t for t in tensors_in(inputs) if t.requires_grad and t.is_leaf]
    if not ends or not leaves:
        return []
    ones = [torch.ones_like(end) for end in ends]
    return list(torch.autograd.grad(ends, leaves, ones, allow_unused=True))
