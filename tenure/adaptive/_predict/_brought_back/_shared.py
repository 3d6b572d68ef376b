"""Tensors of which each rank has a part: the parts are lent, and the whole ones keep their class.

Operations come to the class first, which does them with the parts, on every rank alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor

from tenure._errors import PredictionError
from tenure._storages import inner_tensors
from tenure._torch.sharding import Shards, is_dtensor


def parts_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Tensors with data: parts in the place of those that are shared, and of their gradients."""
    found: dict[int, Tensor] = {}
    for tensor in tensors:
        parts = [tensor]
        if is_dtensor(tensor):
            parts = inner_tensors(tensor)
            # that of a plain tensor is lent with it
            if tensor.is_leaf and tensor.grad is not None:
                parts += parts_of([tensor.grad])
        found |= {id(part): part for part in parts}
    return list(found.values())


@contextmanager
def gradients_kept(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Return a block after which shared leaves have the gradients that they had."""
    before = [(each, each.grad) for each in tensors if is_dtensor(each) and each.is_leaf]
    try:
        yield
    finally:
        for leaf, gradient in before:
            leaf.grad = gradient


def check_between_passes(shards: Shards) -> None:
    """Make sure that nothing of a pass is left, in which what is predicted would be added.

    Raises:
        PredictionError: a module of ``fully_shard`` waits for an exchange.
    """
    if shards.is_exchanging:
        raise PredictionError(
            "The memory of this work can't be predicted: a module of fully_shard has gradients or "
            "parameters that wait for an exchange with other ranks. Predict before the first pass, "
            "or after a backward pass that exchanges."
        )
