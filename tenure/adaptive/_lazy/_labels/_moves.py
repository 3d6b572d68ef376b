"""Rules of operators that give the same elements in another shape or order, or some of them.

Invariant: as of all rules, a place is right for any number of samples, None where it may not be.
"""

from __future__ import annotations

from math import prod

import torch

from ._along import aligned, along_dims, dims_of, source_of
from ._label import Call, Label, label_of, tensors_in


def viewed(call: Call) -> Label | None:
    """The same elements in the same order, in another shape."""
    source, shape = source_of(call), call.out.shape
    label = label_of(source)
    left = prod(source.shape[: label.dim]) * label.outer
    right = label.inner * prod(source.shape[label.dim + 1 :])
    before = 1
    for d, size in enumerate(shape):
        if size and left % before == 0:
            outer = left // before
            if not outer:
                return None
            inner, rest = divmod(size, outer * call.n)
            if not rest and inner * prod(shape[d + 1 :]) == right:
                return Label("batch", d, outer, inner)
        before *= size
        if not before:
            return None
    return None


def expanded(call: Call) -> Label | None:
    """More dimensions in front, or more of what is one."""
    source = source_of(call)
    label = label_of(source)
    return label._replace(dim=label.dim + call.out.dim() - source.dim())


def repeated(call: Call) -> Label | None:
    """All of it, several times along its dimensions."""
    source = source_of(call)
    label = label_of(source)
    d = label.dim + call.out.dim() - source.dim()
    times = call.args["repeats"][d]
    return Label("batch", d, label.outer * times, label.inner) if times else None


def permuted(call: Call) -> Label | None:
    """Dimensions in another order."""
    source = source_of(call)
    label = label_of(source)
    dims = [d % source.dim() for d in call.args["dims"]]
    return label._replace(dim=dims.index(label.dim))


def transposed(call: Call) -> Label | None:
    """Two dimensions in each other's place."""
    source = source_of(call)
    label = label_of(source)
    if source.dim() < 2:
        return label
    a, b = (call.args.get(k, k == "dim1") % source.dim() for k in ("dim0", "dim1"))
    return label._replace(dim={a: b, b: a}.get(label.dim, label.dim))


def unsqueezed(call: Call) -> Label | None:
    """One more dimension."""
    label = label_of(source_of(call))
    at = call.args["dim"] % call.out.dim()
    return label._replace(dim=label.dim + (at <= label.dim))


def squeezed(call: Call) -> Label | None:
    """Dimensions of size 1 taken out."""
    source = source_of(call)
    label = label_of(source)
    dims = dims_of(call, source)
    gone = [d for d in (range(source.dim()) if dims is None else dims) if source.shape[d] == 1]
    return label._replace(dim=label.dim - sum(d < label.dim for d in gone))


def diagonal(call: Call) -> Label | None:
    """The diagonal of two dimensions."""
    source = source_of(call)
    label = label_of(source)
    dims = [call.args[k] % source.dim() for k in ("dim1", "dim2")]
    if label.dim in dims:
        return None
    return label._replace(dim=label.dim - sum(d < label.dim for d in dims))


def joined(call: Call) -> Label | None:
    """Tensors one after the other."""
    # torch leaves empty ones out, as caches of keys and values begin with
    tensors = [t for t in call.args["tensors"] if t.shape != (0,)]
    (label, *others) = {label_of(t) for t in tensors}
    if others or len({t.dim() for t in tensors}) != 1 or not label.is_batch:
        return None
    # one after the other, each with all samples
    along = call.args["dim"] % tensors[0].dim() == label.dim
    return label._replace(outer=label.outer * len(tensors)) if along else label


def sliced(call: Call) -> Label | list[Label] | None:
    """A part of a dimension; of that of the samples whole runs through all of them."""
    source = source_of(call)
    label = label_of(source)
    if call.args.get("dim", 0) % source.dim() != label.dim:
        return along_dims(call)
    once = label.inner * call.n
    start = call.args.get("start") or 0
    if start < 0 or call.args.get("step", 1) != 1:
        return None
    found = []
    for each in tensors_in([call.out]):
        size = each.shape[label.dim]
        if start % once or size % once or not size:
            return None
        found.append(label._replace(outer=size // once))
        start += size
    return found


def stacked(call: Call) -> Label | None:
    """Tensors along a dimension of their own."""
    tensors = call.args["tensors"]
    (label, *others) = {label_of(t) for t in tensors}
    if others or not label.is_batch:
        return None
    return label._replace(dim=label.dim + (call.args["dim"] % call.out.dim() <= label.dim))


def indexed(call: Call) -> Label | None:
    """What indices say, of a tensor with samples or for each sample."""
    source, indices = call.args["self"], call.args["indices"]
    label, given = label_of(source), [(i, t) for i, t in enumerate(indices) if t is not None]
    if any(t.dtype in (torch.bool, torch.uint8) for _, t in given):
        return None
    first, n_dims = given[0][0], max(t.dim() for _, t in given)
    in_a_row = [i for i, _ in given] == list(range(first, first + len(given)))
    start = first if in_a_row else 0
    if not label.is_batch:
        found = aligned([t for _, t in given], n_dims)
        return None if found is None else found._replace(dim=found.dim + start)
    if any(label_of(t).is_batch or i == label.dim for i, t in given):
        return None
    before = label.dim - sum(i < label.dim for i, _ in given)
    moved = before < start if in_a_row else False
    return label._replace(dim=before if moved else before + n_dims)


def masked_write(call: Call) -> Label | None:
    """Writes one number where a mask says so."""
    source, indices, values = (call.args[k] for k in ("self", "indices", "values"))
    if len(indices) != 1 or indices[0] is None or indices[0].dtype is not torch.bool:
        return None
    mask, label = indices[0], label_of(source)
    ends = label.is_batch and label.dim < mask.dim()
    same = label_of(mask) == label and not label_of(values).is_batch
    return label if ends and same and not values.dim() else None


def embedded(call: Call) -> Label | None:
    """Rows of a table that all samples share."""
    weight, indices = call.args["weight"], call.args["indices"]
    return None if label_of(weight).is_batch else label_of(indices)


def padded(call: Call) -> Label | None:
    """More elements around the last dimensions."""
    source = source_of(call)
    label = label_of(source)
    return label if label.dim < source.dim() - len(call.args["pad"]) // 2 else None
