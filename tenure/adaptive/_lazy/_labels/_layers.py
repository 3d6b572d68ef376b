"""Rules of products, convolutions, normalizations, attention and losses.

Invariant: as of all rules, a place is right for any number of samples, None where it may not be.
"""

from __future__ import annotations

from ._along import aligned, pointwise
from ._label import SHARED, Call, Label, Rule, label_of, tensors_in


def multiplied(call: Call) -> Label | None:
    """A product of matrices, of batches of them, or of vectors, and what is added to it."""
    names = {"addmm": ("mat1", "mat2"), "addbmm": ("batch1", "batch2"), "mv": ("self", "vec")}
    names |= {"baddbmm": ("batch1", "batch2"), "addmv": ("mat", "vec")}
    a, b = (call.args[k] for k in names.get(call.name, ("self", "mat2")))
    label = _of_product(label_of(a), label_of(b), a.dim() - 2)
    added = call.args.get("self") if call.name in ("addmm", "baddbmm", "addmv") else None
    if label is None or added is None:
        return label
    at = label.dim - (call.out.dim() - added.dim())
    if label_of(added).is_batch:
        return label if label_of(added)._replace(dim=label.dim) == label else None
    return label if at < 0 or added.shape[at] == 1 else None


def _of_product(a: Label, b: Label, rows: int) -> Label | None:
    if a.is_batch and b.is_batch:
        return a if a == b and a.dim < rows else None
    if a.is_batch:
        return a if a.dim == rows else None
    return b if b.dim == rows + 1 else None


def linear(call: Call) -> Label | None:
    """A product with a matrix that all samples share."""
    source = call.args["input"]
    label = label_of(source)
    alone = [t for t in call.labelled() if t is not source] == []
    return label if label.is_batch and alone and label.dim < source.dim() - 1 else None


def leading(n_dims: int) -> Rule:
    """Works on so many last dimensions, and on each place of the others alone."""

    def rule(call: Call) -> Label | list[Label] | None:
        sources = call.labelled()
        label = label_of(sources[0])
        if any(label_of(t) != label or label.dim >= t.dim() - n_dims for t in sources):
            return None
        others = [t for t in call.tensors() if not label_of(t).is_batch]
        if any(t.dim() == sources[0].dim() and t.shape[label.dim] != 1 for t in others):
            return None
        return label

    return rule


def convolved(call: Call) -> Label | None:
    """A convolution, whose samples stand first."""
    label = label_of(call.args.get("input", call.args.get("self")))
    return label if label.is_batch and not label.dim and len(call.labelled()) == 1 else None


def along_first(call: Call) -> Label | list[Label] | None:
    """Works on each place of the first dimension alone; later results may be of another kind."""
    labels = {label_of(t) for t in call.labelled()}
    (label, *others) = labels
    out = next(iter(tensors_in([call.out])))
    if others or label.dim or not out.dim() or out.shape[0] != label.size(call.n):
        return None
    return [
        label if t.dim() and t.shape[0] == label.size(call.n) else SHARED
        for t in tensors_in([call.out])
    ]


def layer_norm(call: Call) -> Label | None:
    """A normalization over the last dimensions."""
    source = call.args["input"]
    label = label_of(source)
    alone = len(call.labelled()) == 1 and label.is_batch
    return (
        label if alone and label.dim < source.dim() - len(call.args["normalized_shape"]) else None
    )


def batch_norm(call: Call) -> Label | list[Label] | None:
    """A normalization by statistics that are known; in training it mixes."""
    source = call.args["input"]
    label = label_of(source)
    if len(call.labelled()) != 1 or not label.is_batch:
        return None
    training = call.args.get("training", call.args.get("train", "no_training" not in call.name))
    if label.dim or training:
        return None
    return [label, *[SHARED] * (len(list(tensors_in([call.out]))) - 1)]


def attention(call: Call) -> Label | list[Label] | None:
    """Attention inside of each sample."""
    heads = [call.args[k] for k in ("query", "key", "value")]
    labels = {label_of(t) for t in heads}
    (label, *others) = labels
    if others or not label.is_batch or label.dim > 1:
        return None
    for key in ("attn_bias", "attn_mask"):
        mask = call.args.get(key)
        if mask is not None and aligned([heads[0], mask], heads[0].dim()) is None:
            return None
    return [
        label if t.dim() > label.dim and t.shape[label.dim] == label.size(call.n) else SHARED
        for t in tensors_in([call.out])
    ]


def lossy(call: Call) -> Label | list[Label] | None:
    """A loss of each element."""
    return None if call.args["reduction"] else pointwise(call)


def likelihood(call: Call) -> Label | list[Label] | None:
    """A loss of each sample's labels, with the same weights for all."""
    given = [call.args["self"], call.args["target"]]
    of_classes = [t for t in call.labelled() if all(t is not each for each in given)]
    alone = given[0].dim() < 2 or label_of(given[0]) != label_of(given[1])
    return None if call.args["reduction"] or of_classes or alone else along_first(call)


def bucketized(call: Call) -> Label | None:
    """The places of elements among boundaries that all samples share."""
    return None if label_of(call.args["boundaries"]).is_batch else label_of(call.args["self"])
