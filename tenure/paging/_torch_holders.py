"""Whether anything but one dictionary holds a tensor: a variable, a view, a graph of autograd."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_ALONE_IN_C = 1


def is_held(holder: Mapping[Any, Tensor], key: Any) -> bool:
    """Whether ``holder[key]`` has another holder; views, saved tensors and containers count.

    A tensor made of it by ``detach()`` or ``.data`` is not seen.
    """
    tensor: Any = holder[key]
    n_in_c = tensor._use_count()
    del tensor
    return n_in_c > _ALONE_IN_C or _n_holders(holder, key) > _alone()


def _n_holders(holder: Mapping[Any, object], key: Any) -> int:
    return sys.getrefcount(holder[key])


@functools.cache
def _alone() -> int:
    return _n_holders({0: object()}, 0)


def works() -> bool:
    """Whether this torch lets a view and a graph be seen, and their end."""
    with torch.inference_mode(False), torch.enable_grad():
        holder = {0: torch.ones(2, 2)}
        seen = [is_held(holder, 0)]
        view = holder[0].t()
        seen.append(is_held(holder, 0))
        del view
        product = torch.ones(2, 2, requires_grad=True) * holder[0]
        seen.append(is_held(holder, 0))
        del product
        return [*seen, is_held(holder, 0)] == [False, True, True, False]
