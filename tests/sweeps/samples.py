"""The samples that torch tests an operator with.

`OpInfo.sample_inputs` looks for the test that asks, in `inspect.stack()`: among the thousands of
modules of a process that has imported a trainer or two that takes longer than any test, twice.
"""

from collections.abc import Iterator
from itertools import islice

import torch
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

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
