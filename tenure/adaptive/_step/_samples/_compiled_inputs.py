"""What compiled code gets that was computed from the batch: it is of other sizes, too.

A mark on a tensor of the batch is gone from what is computed of it. So where blocks of a model are
compiled and not the whole, what each gets is looked at before it runs; and where functions are,
such as a loss, what modules return to them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from tenure._containers import tensors_in
from tenure._torch.compiler import is_compiled, mark_dynamic
from tenure._torch.modules import modules_told
from tenure.scopes import owner_of


def expecting_other_sizes_of(
    compiled: Collection[object], length: Callable[[], int]
) -> AbstractContextManager[None]:
    """Open a block in which inputs of compiled code are marked as changing in size.

    Args:
        compiled: the compiled modules and functions that are known.
        length: how many samples the function runs on now.
    """
    has_functions = any(not isinstance(each, nn.Module) for each in compiled)

    def given(module: nn.Module, values: Any) -> None:
        if is_compiled(module):
            _mark(values, length())

    def returned(module: nn.Module, values: Any) -> None:
        _mark(values, length())

    return modules_told(given, returned if has_functions else None) if compiled else nullcontext()


def _mark(values: Any, length: int) -> None:
    # of one sample nothing says which dimension it is, and it is compiled by itself
    if length < 2:
        return
    for tensor in tensors_in([values]):
        # one dimension: two that are marked and of one size are taken to be the same
        dim = next((i for i, size in enumerate(tensor.shape) if size == length), None)
        # what was there before the step would keep the mark
        if dim is not None and (tensor.grad_fn is not None or owner_of(tensor) is not None):
            mark_dynamic(tensor, dim)
