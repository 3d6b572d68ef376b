"""Rules of operators that work element by element, or along some dimensions.

Invariant: a rule that gives a place is right for any number of samples; it gives None where samples
are mixed, or where nobody has thought it through.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from ._label import Call, Label, label_of, tensors_in


def pointwise(call: Call) -> Label | None:
    """Works on each element alone."""
    tensors = call.tensors()
    return aligned(tensors, max(t.dim() for t in tensors))


def aligned(tensors: Iterable[Tensor], n_dims: int) -> Label | None:
    """The label of tensors that are broadcast to one shape of so many dimensions."""
    tensors = list(tensors)
    found = {
        label_of(t)._replace(dim=label_of(t).dim + n_dims - t.dim())
        for t in tensors
        if label_of(t).is_batch
    }
    if len(found) != 1:
        return None
    (label,) = found
    for each in tensors:
        at = label.dim - (n_dims - each.dim())
        if not label_of(each).is_batch and at >= 0 and each.shape[at] != 1:
            return None
    return label


def source_of(call: Call) -> Tensor:
    """The first tensor that an operator was given."""
    return next(iter(call.tensors()))


def dims_of(call: Call, source: Tensor) -> list[int] | None:
    """The dimensions that an operator works along; None: along all."""
    found = [
        call.args[k] for k in ("dim", "dims", "dim0", "dim1", "dim2", "axis") if k in call.args
    ]
    if "dimension" in call.args:
        found.append(call.args["dimension"])
    if not found or found[0] is None or found[0] == []:
        return None
    flat = [d for each in found for d in (each if isinstance(each, list | tuple) else [each])]
    return [d % max(source.dim(), 1) for d in flat]


def along_dims(call: Call) -> Label | None:
    """Works along some dimensions, and on each place of the others alone."""
    sources = call.labelled()
    source, label = sources[0], label_of(sources[0])
    if any(label_of(t) != label or t.dim() != source.dim() for t in sources):
        return None
    others = [t for t in call.tensors() if not label_of(t).is_batch]
    if any(label.dim < t.dim() and t.dim() == source.dim() for t in others):
        return None
    dims = dims_of(call, source)
    if dims is None:
        return None if call.name not in ("sum", "mean") else _reduced(call, source)
    out = next(iter(tensors_in([call.out])))
    if label.dim in dims:
        if call.name in ("sum", "mean") and not out.dim():
            return _reduced(call, source)
        return None
    if out.dim() >= source.dim():
        return label
    return label._replace(dim=label.dim - sum(d < label.dim for d in set(dims)))


def _reduced(call: Call, source: Tensor) -> Label | None:
    return Label(call.name) if label_of(source).is_batch and not call.out.dim() else None
