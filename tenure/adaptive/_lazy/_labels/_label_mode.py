"""Operators that run on tensors without data, whose results get labels: where the samples are.

An operator is followed only where it is known to keep samples apart; what is not known mixes them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tenure._torch.modes import DispatchMode, schema_of

from ._label import MIXED, SHARED, Bound, Call, Label, label_of, set_label, tensors_in
from ._rules import is_like_its_argument, rule_for

_WITH_NUMBERS = frozenset({"fill_", "masked_fill", "masked_fill_", "where", "clamp_", "lerp"})


_KEEPS_STATE = frozenset({"native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm"})


_NEW = frozenset({"new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided"})


_FILLING = _NEW | {"zeros", "ones", "full", "empty", "expand", "repeat", "empty_strided"}


class LabelMode(DispatchMode):
    """Gives the results of operators their labels.

    Args:
        n: the number of samples, a prime that no other size has.

    Attributes:
        mixing: what the first operator did that mixed samples.
        is_number: whether a size was used as a number.
    """

    def __init__(self, n: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch left it unannotated
        self._n = n
        self.mixing: str | None = None
        self.is_number = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, and label what it gives."""
        out = func(*args, **(kwargs or {}))
        call = _call_of(func, args, kwargs or {}, out, self._n)
        labels = self._labels(call)
        outs = list(tensors_in([out]))
        for i, each in enumerate(outs):
            label = labels[i] if isinstance(labels, list) else labels
            self._give(each, label, _why(call))
        self._write(func, call)
        return out

    def _labels(self, call: Call) -> Label | list[Label]:
        if call.is_pointwise or call.name in _WITH_NUMBERS:
            numbers = [v for v in call.args.values() if type(v) in (int, float)]
            self.is_number |= any(v and v % self._n == 0 for v in numbers)
        if call.name in ("full", "new_full", "scalar_tensor"):
            value = call.args.get("fill_value", call.args.get("s"))
            self.is_number |= type(value) is int and value != 0 and value % self._n == 0
        kinds = {label_of(t).kind for t in call.tensors()}
        if kinds <= {"shared"} or call.name.startswith("new_"):
            return _filled(call)
        if not kinds <= {"shared", "batch"}:
            # a reduction may still change its type
            (only,) = {label_of(t) for t in call.tensors()} if len(kinds) == 1 else {MIXED}
            return only if is_like_its_argument(call.name) else MIXED
        rule = rule_for(call)
        found = rule(call) if rule is not None else None
        return MIXED if found is None else found

    def _give(self, tensor: Tensor, label: Label, why: str) -> None:
        if (
            label.is_batch
            and (label.dim >= tensor.dim() or tensor.shape[label.dim] != label.size(self._n))
        ) or (label.kind == "shared" and any(s and s % self._n == 0 for s in tensor.shape)):
            label = MIXED
        if label.kind != "shared" and not label.is_batch and self.mixing is None:
            self.mixing = why
        set_label(tensor, label)

    def _write(self, func: Any, call: Call) -> None:
        """What is written into has the samples of what is written."""
        outs = {id(t) for t in tensors_in([call.out])}
        for argument in schema_of(func).arguments:
            alias = argument.alias_info
            if alias is None or not alias.is_write:
                continue
            for each in tensors_in([call.args.get(argument.name)]):
                if id(each) not in outs and call.name not in _KEEPS_STATE:
                    set_label(each, MIXED)


def _why(call: Call) -> str:
    is_known = rule_for(call) is not None
    what = "mixes the samples" if is_known else "is not known to keep samples apart"
    return f"{call.name} {what}"


def _call_of(func: Any, args: Any, kwargs: Any, out: Any, n: int) -> Call:
    schema = schema_of(func)
    bound: Bound = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    bound |= {a.name: value for a, value in zip(schema.arguments, args, strict=False)}
    is_pointwise = torch.Tag.pointwise in func.tags
    return Call(schema.name.partition("::")[2], bound | kwargs, out, n, is_pointwise)


def _filled(call: Call) -> Label | list[Label]:
    """What is made of no samples: all alike, also where it has a part for each."""
    if not isinstance(call.out, Tensor) or call.name not in _FILLING:
        return SHARED
    source = next(iter(call.tensors()), None)
    dims = [d for d, size in enumerate(call.out.shape) if size and size % call.n == 0]
    if len(dims) != 1:
        return SHARED if not dims else MIXED
    (d,) = dims
    if call.name in ("expand", "repeat") and source is not None:
        before = d - (call.out.dim() - source.dim())
        if before >= 0 and source.shape[before] != 1:
            return MIXED
    return Label("batch", d, 1, call.out.shape[d] // call.n)
