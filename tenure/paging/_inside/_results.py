"""What a forward returns of its weights: copies, for their memory is where other weights pass.

Invariant: what shares no memory with a page is returned as it is, in the containers that it is in.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from tenure._storages import storages_of
from tenure._torch.storages import key_of
from tenure._tree_copies import Survey

from ._arguments import is_leaf


def apart_from(lent: Collection[int], output: Any) -> Any:
    """An output with copies in place of tensors that lie in memory of pages.

    Args:
        lent: the ids of the storages of pages, as ``_cdata``.
        output: tensors in lists, tuples, dictionaries and dataclasses. What is in other objects is
            no less safe: its page is not reused as long as it is held.
    """
    survey = Survey(output, is_leaf=is_leaf)
    copies = {
        key: _copy(node)
        for key, node in survey.nodes.items()
        if isinstance(node, Tensor) and node.grad_fn is None and _is_in(lent, node)
    }
    return survey.replaced(copies) if copies else output


def _is_in(lent: Collection[int], tensor: Tensor) -> bool:
    return any(key_of(storage) in lent for storage in storages_of(tensor))


def _copy(tensor: Tensor) -> Tensor:
    # not aside: it is the model's result, which the scopes and modes of the caller are to see
    with torch.no_grad():
        return tensor.detach().clone()
