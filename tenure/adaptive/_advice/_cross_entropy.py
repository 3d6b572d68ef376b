"""Logits that go into a cross entropy at once, computed a part at a time instead.

Invariant: only logits that nothing else reads are left out; where something does, there is no
advice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tenure._torch.storages import key_of

from .._predict import Work
from ._change import AdvisedChange, expression_of, repeated_blocks

_VIEWS = ("view", "reshape", "flatten", "unflatten", "size", "dim", "__get__", "stride")
"""Functions that read no values, and give a view."""
_MOST_HEADS = 2
"""So many linear layers are tried, the last that are in no repeated block."""


def chunked_cross_entropy(work: Work, _has_backward: bool) -> Iterator[AdvisedChange]:
    """`F.linear_cross_entropy` in the place of a linear layer and its cross entropy."""
    # torch before 2.13
    if not hasattr(F, "linear_cross_entropy"):
        return
    repeated = {
        m for _, _, each in repeated_blocks(work) for block in each for m in block.modules()
    }
    heads = [m for m in work.modules if isinstance(m, nn.Linear) and m not in repeated]
    for head in heads[-_MOST_HEADS:]:
        place = expression_of(work, head)
        bias = "" if head.bias is None else f", linear_bias={place}.bias"
        yield AdvisedChange(
            f"compute the logits of {place} a part at a time, within their cross entropy",
            f"F.linear_cross_entropy(hidden, {place}.weight, target{bias}, options="
            f"torch.nn.LinearCrossEntropyOptions()) for F.cross_entropy({place}(hidden), target)",
            around=functools.partial(_in_parts, head.weight),
        )


class _NotThisWayError(Exception):
    """The logits are used for something else, or never come into a cross entropy."""


def _in_parts(weight: Tensor, fn: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _InParts(weight) as mode:
            result = fn(*args, **kwargs)
        if mode.n_replaced:
            return result
        raise _NotThisWayError

    return run


class _InParts(TorchFunctionMode):
    """Leaves the product with a weight out, and computes it where its cross entropy is.

    Args:
        weight: that of the layer whose logits are meant.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.n_replaced = 0
        self._weight = weight
        # of the stand-ins, what the product would have been made of
        self._left_out: dict[int, tuple[Tensor, Tensor | None, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and len(args) > 1 and args[1] is self._weight:
            return self._leave_out(*args, **kwargs)
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        keys = [key_of(each.untyped_storage()) for each in given] if self._left_out else []
        known = next((self._left_out[key] for key in keys if key in self._left_out), None)
        if known is None:
            return func(*args, **kwargs)
        if func is F.cross_entropy:
            return self._replace(known, *args, **kwargs)
        name = getattr(func, "__name__", "")
        # no copy of what would be there, and one of what is not
        if name == "contiguous" or (name == "float" and args[0].dtype is torch.float32):
            return args[0]
        if name not in _VIEWS:
            raise _NotThisWayError
        return func(*args, **kwargs)

    def _leave_out(self, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        # one number, of the shape of all
        stand_in = hidden.detach().new_empty(()).expand(*hidden.shape[:-1], weight.shape[0])
        self._left_out[key_of(stand_in.untyped_storage())] = hidden, bias, stand_in
        return stand_in

    def _replace(self, known: Any, *args: Any, **kwargs: Any) -> Any:
        hidden, bias, stand_in = known
        given = signature(F.cross_entropy).bind(*args, **kwargs).arguments
        logits, target = given.pop("input"), given.pop("target")
        # any other order of the samples is another function
        is_other = logits.dim() != 2 or logits.numel() != stand_in.numel() or target.dim() != 1
        is_old = any(given.pop(name, None) is not None for name in ("size_average", "reduce"))
        if is_other or is_old:
            raise _NotThisWayError
        self.n_replaced += 1
        rows, options = hidden.reshape(-1, hidden.shape[-1]), nn.LinearCrossEntropyOptions()
        given = {"ignore_index": -100, "linear_bias": bias, "options": options, **given}
        return F.linear_cross_entropy(rows, self._weight, target, **given)
