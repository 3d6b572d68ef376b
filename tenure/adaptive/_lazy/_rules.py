"""Where the results of operators have their samples: a rule for each that keeps them apart.

Invariant: a rule that gives a place is right for any number of samples; it gives None where samples
are mixed, or where nobody has thought it through. Held over torch's operators by
``tests/sweeps/test_lazy.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod

import torch
from torch import Tensor

from ._labels import SHARED, Call, Label, label_of, tensors_in

Rule = Callable[[Call], Label | list[Label] | None]


def rule_for(call: Call) -> Rule | None:
    """The rule of an operator; None where there is none."""
    rule = _RULES.get(call.name)
    return _pointwise if rule is None and call.is_pointwise else rule


def is_like_its_argument(name: str) -> bool:
    """Whether an operator changes nothing of a tensor but its type."""
    return name in _SAME


def _pointwise(call: Call) -> Label | None:
    tensors = call.tensors()
    return _aligned(tensors, max(t.dim() for t in tensors))


def _aligned(tensors: Iterable[Tensor], n_dims: int) -> Label | None:
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


def _source(call: Call) -> Tensor:
    return next(iter(call.tensors()))


def _dims(call: Call, source: Tensor) -> list[int] | None:
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


def _along(call: Call) -> Label | None:
    """Works along some dimensions, and on each place of the others alone."""
    sources = call.labelled()
    source, label = sources[0], label_of(sources[0])
    if any(label_of(t) != label or t.dim() != source.dim() for t in sources):
        return None
    others = [t for t in call.tensors() if not label_of(t).is_batch]
    if any(label.dim < t.dim() and t.dim() == source.dim() for t in others):
        return None
    dims = _dims(call, source)
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


def _viewed(call: Call) -> Label | None:
    """The same elements in the same order, in another shape."""
    source, shape = _source(call), call.out.shape
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


def _expanded(call: Call) -> Label | None:
    source = _source(call)
    label = label_of(source)
    return label._replace(dim=label.dim + call.out.dim() - source.dim())


def _repeated(call: Call) -> Label | None:
    source = _source(call)
    label = label_of(source)
    d = label.dim + call.out.dim() - source.dim()
    times = call.args["repeats"][d]
    return Label("batch", d, label.outer * times, label.inner) if times else None


def _permuted(call: Call) -> Label | None:
    source = _source(call)
    label = label_of(source)
    dims = [d % source.dim() for d in call.args["dims"]]
    return label._replace(dim=dims.index(label.dim))


def _transposed(call: Call) -> Label | None:
    source = _source(call)
    label = label_of(source)
    if source.dim() < 2:
        return label
    a, b = (call.args.get(k, k == "dim1") % source.dim() for k in ("dim0", "dim1"))
    return label._replace(dim={a: b, b: a}.get(label.dim, label.dim))


def _unsqueezed(call: Call) -> Label | None:
    label = label_of(_source(call))
    at = call.args["dim"] % call.out.dim()
    return label._replace(dim=label.dim + (at <= label.dim))


def _squeezed(call: Call) -> Label | None:
    source = _source(call)
    label = label_of(source)
    dims = _dims(call, source)
    gone = [d for d in (range(source.dim()) if dims is None else dims) if source.shape[d] == 1]
    return label._replace(dim=label.dim - sum(d < label.dim for d in gone))


def _diagonal(call: Call) -> Label | None:
    source = _source(call)
    label = label_of(source)
    dims = [call.args[k] % source.dim() for k in ("dim1", "dim2")]
    if label.dim in dims:
        return None
    return label._replace(dim=label.dim - sum(d < label.dim for d in dims))


def _joined(call: Call) -> Label | None:
    # torch leaves empty ones out, as caches of keys and values begin with
    tensors = [t for t in call.args["tensors"] if t.shape != (0,)]
    (label, *others) = {label_of(t) for t in tensors}
    if others or len({t.dim() for t in tensors}) != 1 or not label.is_batch:
        return None
    # one after the other, each with all samples
    along = call.args["dim"] % tensors[0].dim() == label.dim
    return label._replace(outer=label.outer * len(tensors)) if along else label


def _sliced(call: Call) -> Label | list[Label] | None:
    """A part of a dimension; of that of the samples whole runs through all of them."""
    source = _source(call)
    label = label_of(source)
    if call.args.get("dim", 0) % source.dim() != label.dim:
        return _along(call)
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


def _stacked(call: Call) -> Label | None:
    tensors = call.args["tensors"]
    (label, *others) = {label_of(t) for t in tensors}
    if others or not label.is_batch:
        return None
    return label._replace(dim=label.dim + (call.args["dim"] % call.out.dim() <= label.dim))


def _indexed(call: Call) -> Label | None:
    source, indices = call.args["self"], call.args["indices"]
    label, given = label_of(source), [(i, t) for i, t in enumerate(indices) if t is not None]
    if any(t.dtype in (torch.bool, torch.uint8) for _, t in given):
        return None
    first, n_dims = given[0][0], max(t.dim() for _, t in given)
    in_a_row = [i for i, _ in given] == list(range(first, first + len(given)))
    start = first if in_a_row else 0
    if not label.is_batch:
        found = _aligned([t for _, t in given], n_dims)
        return None if found is None else found._replace(dim=found.dim + start)
    if any(label_of(t).is_batch or i == label.dim for i, t in given):
        return None
    before = label.dim - sum(i < label.dim for i, _ in given)
    moved = before < start if in_a_row else False
    return label._replace(dim=before if moved else before + n_dims)


def _masked_write(call: Call) -> Label | None:
    """Writes one number where a mask says so."""
    source, indices, values = (call.args[k] for k in ("self", "indices", "values"))
    if len(indices) != 1 or indices[0] is None or indices[0].dtype is not torch.bool:
        return None
    mask, label = indices[0], label_of(source)
    ends = label.is_batch and label.dim < mask.dim()
    same = label_of(mask) == label and not label_of(values).is_batch
    return label if ends and same and not values.dim() else None


def _embedded(call: Call) -> Label | None:
    weight, indices = call.args["weight"], call.args["indices"]
    return None if label_of(weight).is_batch else label_of(indices)


def _multiplied(call: Call) -> Label | None:
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


def _linear(call: Call) -> Label | None:
    source = call.args["input"]
    label = label_of(source)
    alone = [t for t in call.labelled() if t is not source] == []
    return label if label.is_batch and alone and label.dim < source.dim() - 1 else None


def _leading(n_dims: int) -> Rule:
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


def _convolved(call: Call) -> Label | None:
    label = label_of(call.args.get("input", call.args.get("self")))
    return label if label.is_batch and not label.dim and len(call.labelled()) == 1 else None


def _first(call: Call) -> Label | list[Label] | None:
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


def _layer_norm(call: Call) -> Label | None:
    source = call.args["input"]
    label = label_of(source)
    alone = len(call.labelled()) == 1 and label.is_batch
    return (
        label if alone and label.dim < source.dim() - len(call.args["normalized_shape"]) else None
    )


def _batch_norm(call: Call) -> Label | list[Label] | None:
    source = call.args["input"]
    label = label_of(source)
    if len(call.labelled()) != 1 or not label.is_batch:
        return None
    training = call.args.get("training", call.args.get("train", "no_training" not in call.name))
    if label.dim or training:
        return None
    return [label, *[SHARED] * (len(list(tensors_in([call.out]))) - 1)]


def _attention(call: Call) -> Label | list[Label] | None:
    heads = [call.args[k] for k in ("query", "key", "value")]
    labels = {label_of(t) for t in heads}
    (label, *others) = labels
    if others or not label.is_batch or label.dim > 1:
        return None
    for key in ("attn_bias", "attn_mask"):
        mask = call.args.get(key)
        if mask is not None and _aligned([heads[0], mask], heads[0].dim()) is None:
            return None
    return [
        label if t.dim() > label.dim and t.shape[label.dim] == label.size(call.n) else SHARED
        for t in tensors_in([call.out])
    ]


def _lossy(call: Call) -> Label | list[Label] | None:
    """A loss of each element."""
    return None if call.args["reduction"] else _pointwise(call)


def _likelihood(call: Call) -> Label | list[Label] | None:
    given = [call.args["self"], call.args["target"]]
    of_classes = [t for t in call.labelled() if all(t is not each for each in given)]
    alone = given[0].dim() < 2 or label_of(given[0]) != label_of(given[1])
    return None if call.args["reduction"] or of_classes or alone else _first(call)


def _bucketized(call: Call) -> Label | None:
    return None if label_of(call.args["boundaries"]).is_batch else label_of(call.args["self"])


def _padded(call: Call) -> Label | None:
    source = _source(call)
    label = label_of(source)
    return label if label.dim < source.dim() - len(call.args["pad"]) // 2 else None


def names(text: str) -> list[str]:
    """Names that stand in a text."""
    return text.split()


_SAME = frozenset(names("_to_copy alias clone detach lift_fresh view"))
_RULES: dict[str, Rule] = {
    **dict.fromkeys(
        names("""
        _to_copy copy_ fill_ zero_ detach alias lift_fresh native_dropout _fused_dropout
        bernoulli bernoulli_ normal_ uniform_ exponential_ empty_like zeros_like
        ones_like full_like rand_like randn_like randint_like contiguous dropout
        rrelu_with_noise clamp_ where masked_fill masked_fill_ poisson lerp
        _prelu_kernel nan_to_num binomial
    """),
        _pointwise,
    ),
    **dict.fromkeys(
        names("""
        sum mean amax amin max min argmax argmin all any prod var std var_mean std_mean
        logsumexp linalg_vector_norm norm _softmax _log_softmax softmax log_softmax
        _safe_softmax cumsum cumprod logcumsumexp cummax cummin sort argsort topk
        kthvalue median nanmedian mode flip roll select unbind unfold glu index_select
        gather scatter scatter_add scatter_reduce scatter_ scatter_add_ nansum aminmax
        count_nonzero _fft_r2c _fft_c2c _fft_c2r index_fill index_fill_ index_add
        index_copy
    """),
        _along,
    ),
    **dict.fromkeys(
        names("""
        max_pool1d avg_pool1d adaptive_avg_pool1d adaptive_max_pool1d upsample_nearest1d
        _upsample_nearest_exact1d upsample_linear1d reflection_pad1d replication_pad1d
        view_as_complex
    """),
        _leading(1),
    ),
    **dict.fromkeys(
        names("""
        max_pool2d_with_indices max_pool2d avg_pool2d adaptive_avg_pool2d
        _adaptive_avg_pool2d adaptive_max_pool2d upsample_nearest2d upsample_bilinear2d
        upsample_bicubic2d _upsample_nearest_exact2d _upsample_bilinear2d_aa
        _upsample_bicubic2d_aa reflection_pad2d replication_pad2d mkldnn_max_pool2d triu
        tril inverse linalg_inv_ex linalg_det _linalg_det linalg_cholesky_ex cholesky
        linalg_qr _linalg_svd _linalg_eigh linalg_solve_triangular _linalg_solve_ex
        linalg_matrix_exp _cdist_forward triangular_solve linalg_lu_factor_ex
        _linalg_slogdet max_unpool2d
    """),
        _leading(2),
    ),
    **dict.fromkeys(
        names("""
        max_pool3d_with_indices avg_pool3d adaptive_avg_pool3d _adaptive_avg_pool3d
        adaptive_max_pool3d upsample_nearest3d upsample_trilinear3d reflection_pad3d
        replication_pad3d pixel_shuffle pixel_unshuffle im2col channel_shuffle
        native_channel_shuffle
    """),
        _leading(3),
    ),
    **dict.fromkeys(
        names("""
        view _unsafe_view reshape _reshape_alias
    """),
        _viewed,
    ),
    **dict.fromkeys(
        names("""
        mm addmm bmm baddbmm mv addmv
    """),
        _multiplied,
    ),
    **dict.fromkeys(
        names("""
        convolution mkldnn_convolution convolution_overrideable
    """),
        _convolved,
    ),
    **dict.fromkeys(
        names("""
        native_group_norm grid_sampler_2d grid_sampler_3d multinomial
    """),
        _first,
    ),
    **dict.fromkeys(
        names("""
        native_batch_norm cudnn_batch_norm _native_batch_norm_legit
        _native_batch_norm_legit_no_training _batch_norm_with_update
        _batch_norm_no_update batch_norm_with_update
    """),
        _batch_norm,
    ),
    **dict.fromkeys(
        names("""
        _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention
        _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
        _scaled_dot_product_attention_math
        _scaled_dot_product_fused_attention_overrideable scaled_dot_product_attention
    """),
        _attention,
    ),
    **dict.fromkeys(
        names("""
        native_layer_norm _fused_rms_norm
    """),
        _layer_norm,
    ),
    **dict.fromkeys(
        names("""
        mse_loss smooth_l1_loss huber_loss binary_cross_entropy soft_margin_loss
        binary_cross_entropy_with_logits
    """),
        _lossy,
    ),
    **dict.fromkeys(
        names("""
        nll_loss_forward nll_loss2d_forward multi_margin_loss
        multilabel_margin_loss_forward nll_loss nll_loss2d
    """),
        _likelihood,
    ),
    "expand": _expanded,
    "repeat": _repeated,
    "permute": _permuted,
    **dict.fromkeys(
        names("""
        transpose t
    """),
        _transposed,
    ),
    "unsqueeze": _unsqueezed,
    "squeeze": _squeezed,
    "diagonal": _diagonal,
    "cat": _joined,
    **dict.fromkeys(
        names("""
        slice split split_with_sizes unsafe_split
    """),
        _sliced,
    ),
    "stack": _stacked,
    "view_as_real": _leading(0),
    "index": _indexed,
    **dict.fromkeys(
        names("""
        index_put index_put_
    """),
        _masked_write,
    ),
    "embedding": _embedded,
    "linear": _linear,
    "constant_pad_nd": _padded,
    "bucketize": _bucketized,
}
