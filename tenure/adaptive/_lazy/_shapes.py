"""What a call gives, known without running it: shapes, types, and where the samples are.

A call runs once on tensors without data as it is, and once at another number of samples; later
calls alike are looked up. Invariant: nothing here holds a tensor of the user's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tenure._storages import storage_key
from tenure._torch.fakes import new_mode, unlogged
from tenure._torch.writes import version_of

from ._batch_int import BatchInt
from ._label_mode import LabelMode
from ._labels import MIXED, SHARED, Label, label_of, set_label
from ._tape import filled, flat_tensors

_MANY = 8192
_ELSEWHERE = (10007, 10009)
"""Numbers of samples that no other size is a multiple of."""


class Meta:
    """What is known of a tensor without its data; the same object for equal ones.

    Attributes:
        shape: its sizes.
        stride: how its elements lie.
        dtype: its type.
        device: where it is.
        requires_grad: whether it does.
        is_leaf: whether it was not computed.
        label: where it has the samples.
        size: its shape, with sizes that know how they depend on the batch.
    """

    __slots__ = (
        "device", "dtype", "is_leaf", "label", "requires_grad", "shape", "size", "stride",
    )  # fmt: skip

    def __init__(
        self,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        requires_grad: bool,
        is_leaf: bool,
        label: Label,
    ) -> None:
        self.shape, self.stride, self.dtype, self.device = shape, stride, dtype, device
        self.requires_grad, self.is_leaf, self.label = requires_grad, is_leaf, label
        sizes = list(shape)
        if label.is_batch:
            sizes[label.dim] = BatchInt(sizes[label.dim], label.size)
        self.size = torch.Size(sizes)

    def like(self, label: Label) -> Meta:
        """The same with another label."""
        return _interned(
            self.shape, self.stride, self.dtype, self.device, self.requires_grad, self.is_leaf,
            label,
        )  # fmt: skip

    def requiring(self, requires_grad: bool) -> Meta:
        """The same where it does or does not require grad."""
        return _interned(
            self.shape, self.stride, self.dtype, self.device, requires_grad, self.is_leaf,
            self.label,
        )  # fmt: skip


_metas: dict[Any, Meta] = {}


def _interned(*parts: Any) -> Meta:
    found = _metas.get(parts)
    if found is None:
        if len(_metas) > _MANY:
            _metas.clear()
        found = _metas[parts] = Meta(*parts)
    return found


def _data_label(shape: tuple[int, ...], n_samples: int) -> Label:
    """Where a tensor of data has the samples: where it has that size."""
    dims = [d for d, size in enumerate(shape) if size == n_samples]
    return Label("batch", dims[0]) if dims else SHARED


def meta_of(tensor: Any, label: Label) -> Meta:
    """What a tensor, or one without data, is."""
    return _interned(
        tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad,
        tensor.is_leaf, label,
    )  # fmt: skip


@dataclass(slots=True, eq=False)
class Shape:
    """What is known of calls that are alike.

    Attributes:
        out: what they give, with an int for each tensor: a place in ``metas``, or below zero for
            one of those that they were given.
        metas: what the tensors are.
        changed: what the tensors that they were given are now, by place among those.
        aliases: for each tensor in ``metas`` the tensor given that it is a view of.
        cuts: which plain tensors are cut with the batch: dimension and elements for each sample.
        frozen: whether sizes are taken as the numbers they were.
        kind: ``"chunk"``: runs on a part of the batch; ``"term"``: a reduction over it;
            ``"tail"``: wants all of it.
        why: what makes it want all of it.
        is_value: whether they give no tensor, and change none.
    """

    out: Any
    metas: tuple[Meta, ...]
    changed: dict[int, Meta]
    aliases: tuple[int | None, ...]
    cuts: dict[int, tuple[int, int]]
    frozen: bool
    kind: str
    why: str
    is_value: bool
    writes_plain: bool = False
    is_hook: bool = False
    _before: Any = None

    def as_before(self, n_samples: int) -> Shape:
        """The same where it is made of the batch alone, and so is data like the batch."""
        if self._before is None:
            metas = tuple(meta.like(_data_label(meta.shape, n_samples)) for meta in self.metas)
            self._before = replace(self, metas=metas, kind="before", why="")
        found: Shape = self._before
        return found


HOOK = Shape(
    None, (), {}, (), {}, False, "tail", "it sees the gradient of the whole batch", False,
    is_hook=True,
)  # fmt: skip


NORMALIZATIONS = frozenset({F.batch_norm, torch.batch_norm, F.instance_norm})
"""They write into buffers, which is seen when they run."""
_TRAINING = 5


def _trains_statistics(call: Call) -> bool:
    if call.func not in NORMALIZATIONS:
        return False
    by_name = call.kwargs.get("training", call.kwargs.get("use_input_stats"))
    # torch tells nobody that they are written
    return bool(call.args[_TRAINING] if len(call.args) > _TRAINING else by_name)


class Call:
    """A call that is to be known.

    Args:
        func: the function.
        args: its arguments, with `Ref` for tensors that were recorded.
        kwargs: the same by name.
        metas: what those are, by number.
        plains: the other tensors.
        n_samples: how many samples there are.
        has_sizes: whether one of the arguments is a size of the batch.
    """

    def __init__(
        self,
        func: Callable[..., Any],
        args: Any,
        kwargs: Any,
        metas: dict[int, Meta],
        plains: list[Tensor],
        n_samples: int,
        has_sizes: bool,
    ) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self._metas, self._plains, self._n = metas, plains, n_samples
        self._has_sizes = has_sizes
        self._versions: list[int | None] = []
        self._elsewhere = next(n for n in _ELSEWHERE if n != n_samples)

    def shape(self) -> Shape:
        """Run it without data, and see what it gives.

        Raises:
            Exception: it can't be run without data, or not with these arguments.
        """
        given, out = self._run()
        places = {id(tensor): i for i, tensor in enumerate(given)}
        outs: list[Any] = []
        template = template_of(out, places, outs)
        n_lazy = len(self._metas)
        written = {i for i, t in enumerate(given) if version_of(t) != self._versions[i]}
        labels, why, cuts, frozen = self._elsewhere_labels(len(outs), len(given))
        for label, tensor in zip(labels, outs, strict=False):
            if label.is_batch and not _fits(label, tensor, self._n):
                labels = [MIXED] * len(outs) + labels[len(outs) :]
        metas = tuple(meta_of(tensor, label) for tensor, label in zip(outs, labels, strict=False))
        changed = {
            i: meta_of(given[i], labels[len(outs) + i])
            for i in range(n_lazy)
            if i in written or given[i].requires_grad != self._metas_in_order()[i].requires_grad
        }
        kind = _kind(labels, len(outs))
        aliases = tuple(_alias(tensor, given[:n_lazy]) for tensor in outs)
        return Shape(
            template, metas, changed, aliases, cuts, frozen, kind, why,
            is_value=not outs and not written and _is_plain_value(template),
            writes_plain=any(i >= n_lazy for i in written) or _trains_statistics(self),
        )  # fmt: skip

    def _metas_in_order(self) -> list[Meta]:
        return list(self._metas.values())

    def _run(
        self, n: int | None = None, cuts: dict[int, tuple[int, int]] | None = None,
        label_mode: LabelMode | None = None, frozen: bool = False,
        func: Callable[..., Any] | None = None, **others: Any,
    ) -> tuple[list[Any], Any]:  # fmt: skip
        """Run it without data; the tensors that it was given, and what it gave."""
        mode = new_mode()
        with ExitStack() as block:
            block.enter_context(mode)
            block.enter_context(unlogged())
            if n is not None:
                block.enter_context(torch.no_grad())
            with torch.inference_mode(False):
                made = {i: _fake(meta, n) for i, meta in self._metas.items()}
                plain = [_fake_plain(t, n, (cuts or {}).get(i)) for i, t in enumerate(self._plains)]
            by_id = {id(t): fake for t, fake in zip(self._plains, plain, strict=True)}
            args, kwargs = (
                _with_fakes(filled(each, made.__getitem__, None if frozen else n), by_id)
                for each in (self.args, self.kwargs)
            )
            if label_mode is not None:
                block.enter_context(label_mode)
            given = [*made.values(), *plain]
            self._versions = [version_of(t) for t in given]
            return given, (func or self.func)(*args, **(kwargs | others))

    def _elsewhere_labels(
        self, n_outs: int, n_given: int
    ) -> tuple[list[Label], str, dict[int, tuple[int, int]], bool]:
        """The labels of what it gives, and of what it was given, when it has run."""
        nothing: dict[int, tuple[int, int]] = {}
        mixed = [MIXED] * (n_outs + n_given)
        given = [meta.label for meta in self._metas.values()]
        if not {label.kind for label in given} <= {"shared", "batch"}:
            mixed[n_outs : n_outs + len(given)] = given
            return mixed, "", nothing, False
        why = ""
        for cuts in self._possible_cuts():
            for frozen in (False, True) if self._has_sizes else (False,):
                labels, why_not = self._labels_with(cuts, frozen, n_outs)
                if labels is not None and len(labels) == n_outs + n_given:
                    return labels, why_not, cuts, frozen
                why = why or why_not
        mixed[n_outs : n_outs + len(given)] = given
        return mixed, why, nothing, False

    def _labels_with(
        self, cuts: dict[int, tuple[int, int]], frozen: bool, n_outs: int
    ) -> tuple[list[Label] | None, str]:
        n = self._elsewhere
        mode = LabelMode(n)
        reduction, others = _unreduced(self.func, self.args, self.kwargs)
        if reduction == "unknown":
            return None, "how it reduces is not known to be a mean or a sum over samples"
        try:
            given, out = self._run(n, cuts, mode, frozen, func=_special(self.func), **others)
        except Exception as error:
            return None, f"it does not run on another number of samples ({_brief(error)})"
        if mode.is_number and not frozen:
            return None, "it uses the number of samples as a number"
        tensors: list[Any] = []
        template_of(out, {id(t): i for i, t in enumerate(given)}, tensors)
        if len(tensors) != n_outs:
            return None, "it gives a tensor for each sample"
        labels = [label_of(t) for t in tensors]
        if reduction and labels[0].is_batch:
            labels = [Label(reduction)]
        if any(label == MIXED for label in labels):
            return None, mode.mixing or "it mixes the samples"
        return [*labels, *map(label_of, given)], ""

    def _possible_cuts(self) -> list[dict[int, tuple[int, int]]]:
        """Which plain tensors may have to be cut: none of them, or each that has such a size."""
        inner: dict[int, tuple[int, int]] = {}
        for i, tensor in enumerate(self._plains):
            for dim, size in enumerate(tensor.shape):
                if size == self._n and i not in inner:
                    inner[i] = (dim, 1)
        ways: list[dict[int, tuple[int, int]]] = [{}, inner] if inner else [{}]
        ways += [{i: cut} for i, cut in inner.items()] if len(inner) > 1 else []
        first = [[(d, 1) for d, s in enumerate(t.shape) if s == self._n] for t in self._plains]
        # second dimensions, as of the state of a recurrent network; rows that were flattened
        later = {i: dims[-1] for i, dims in enumerate(first) if len(dims) > 1}
        if later:
            ways.append(inner | later)
        flat = {
            i: (0, t.shape[0] // self._n)
            for i, t in enumerate(self._plains)
            if t.dim() and t.shape[0] % self._n == 0 and t.shape[0] > self._n > 1 and i not in inner
        }
        ways += [flat, inner | flat] if flat else []
        return ways


# --- functions that are known as a whole


def _unreduced(func: Any, args: Any, kwargs: Any) -> tuple[str, dict[str, Any]]:
    """How a loss reduces over samples, and the argument that makes it reduce nothing."""
    name = getattr(func, "__name__", "")
    if func not in _LOSSES:
        return "", {}
    bound = inspect.signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    reduction = given.get("reduction", "mean")
    if given.get("reduce") is not None or given.get("size_average") is not None:
        return "unknown", {}
    if reduction == "none":
        return "", {}
    # weights of these divide the mean
    if name in _WEIGHTED and given.get("weight") is not None:
        return "unknown", {}
    # by position it would be given twice
    if len(args) > list(inspect.signature(func).parameters).index("reduction"):
        return "unknown", {}
    if reduction == "batchmean":
        reduction = "mean"
    elif reduction == "mean" and name in ("cross_entropy", "nll_loss"):
        reduction = "counted"
    return reduction, {"reduction": "none"}


_LOSSES = frozenset({
    F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss,
    F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.kl_div, F.soft_margin_loss,
    F.poisson_nll_loss, F.gaussian_nll_loss, F.cosine_embedding_loss, F.margin_ranking_loss,
    F.hinge_embedding_loss, F.triplet_margin_loss, F.multilabel_soft_margin_loss,
    F.multilabel_margin_loss, F.multi_margin_loss,
})  # fmt: skip
_WEIGHTED = frozenset(["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"])


def _special(func: Any) -> Callable[..., Any] | None:
    return _SPECIAL.get(getattr(func, "__name__", "")) if callable(func) else None


def _all_shared(values: Any) -> bool:
    return all(label_of(tensor) == SHARED for tensor in flat_tensors(list(values)))


def _labelled_recurrent(kind: str) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        source, state, batch_first = args[0], args[1], args[-1]
        label = label_of(source)
        states = list(state) if isinstance(state, list | tuple) else [state]
        # before it runs: along time it would run once for each of many samples
        if (
            # packed sequences have their samples in no dimension
            type(batch_first) is not bool
            or source.dim() != 3
            or label != Label("batch", 0 if batch_first else 1)
            or any(label_of(each) != Label("batch", 1) for each in states)
            or not _all_shared(args[2])
        ):
            raise ValueError(f"{kind} has the samples elsewhere")
        out = getattr(torch, kind)(*args)
        for i, each in enumerate(flat_tensors(out)):
            set_label(each, Label("batch", 1) if i else label)
        return out

    return call


def _labelled_instance_norm(source: Any, *args: Any, **kwargs: Any) -> Any:
    out = F.instance_norm(source, *args, **kwargs)
    names = ("running_mean", "running_var", "weight", "bias", "use_input_stats")
    given = dict(zip(names, args, strict=False)) | kwargs
    tracks = given.get("running_mean") is not None
    label = label_of(source)
    fits = label.is_batch and not label.dim and not tracks and source.dim() > 2
    fits = fits and _all_shared([*args, *kwargs.values()])
    set_label(out, label if fits else MIXED)
    return out


def _labelled_bilinear(left: Any, right: Any, *args: Any, **kwargs: Any) -> Any:
    out = F.bilinear(left, right, *args, **kwargs)
    label = label_of(left)
    fits = label == label_of(right) and label.is_batch and label.dim < left.dim() - 1
    fits = fits and _all_shared([*args, *kwargs.values()])
    set_label(out, label if fits else MIXED)
    return out


_SPECIAL: dict[str, Callable[..., Any]] = {
    **{kind: _labelled_recurrent(kind) for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
    "bilinear": _labelled_bilinear,
    "instance_norm": _labelled_instance_norm,
}


# --- tensors without data


def _fake(meta: Meta, n: int | None) -> Any:
    shape, stride = list(meta.shape), list(meta.stride)
    if n is not None and meta.label.is_batch:
        shape[meta.label.dim] = meta.label.size(n)
        stride = _strides(shape, stride)
    return _empty(shape, stride, meta, n, meta.label)


def _empty(shape: Any, stride: Any, like: Any, n: int | None, label: Label) -> Any:
    with torch.no_grad():
        made = torch.empty_strided(shape, stride, dtype=like.dtype, device=like.device)
    if n is None and like.requires_grad:
        made.requires_grad_()
        if not like.is_leaf:
            with torch.enable_grad():
                made = made.clone()
            if made.stride() != tuple(stride):
                made = made.as_strided(shape, stride)
    if n is not None:
        set_label(made, label)
    return made


def _strides(shape: list[int], like: Sequence[int]) -> list[int]:
    """Dense strides in the order of others."""
    strides, step = [0] * len(shape), 1
    for d in sorted(range(len(shape)), key=lambda d: (like[d], -d)):
        if like[d]:
            strides[d], step = step, step * max(shape[d], 1)
    return strides


def _fake_plain(tensor: Tensor, n: int | None, cut: tuple[int, int] | None) -> Any:
    shape, stride, label = list(tensor.shape), tensor.stride(), SHARED
    if n is not None and cut is not None:
        dim, inner = cut
        label = Label("batch", dim, 1, inner)
        shape[dim] = label.size(n)
        stride = tuple(_strides(shape, stride))
    return _empty(shape, stride, tensor, n, label)


def _with_fakes(value: Any, by_id: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        return by_id.get(id(value), value)
    if type(value) in (tuple, list):
        return type(value)([_with_fakes(each, by_id) for each in value])
    if type(value) is dict:
        return {key: _with_fakes(each, by_id) for key, each in value.items()}
    return value


def template_of(value: Any, places: dict[int, int], outs: list[Any]) -> Any:
    """What was returned, with an `Out` for each tensor."""
    if isinstance(value, Tensor):
        place = places.get(id(value))
        if place is not None:
            return Out(-1 - place)
        outs.append(value)
        return Out(len(outs) - 1)
    if isinstance(value, tuple | list):
        return rebuilt(value, [template_of(each, places, outs) for each in value])
    if isinstance(value, dict):
        return {key: template_of(each, places, outs) for key, each in value.items()}
    return value


def numbers_in(template: Any, numbers: list[int]) -> list[int | None]:
    """The numbers of the tensors in what a call gives; None for one that it was given."""
    if isinstance(template, Out):
        return [numbers[template] if template >= 0 else None]
    if isinstance(template, dict):
        template = list(template.values())
    if isinstance(template, tuple | list):
        return [number for each in template for number in numbers_in(each, numbers)]
    return []


class Out(int):
    """The place of a tensor in what a call gives; below zero one that it was given."""


def rebuilt(like: Any, children: list[Any]) -> Any:
    """A container like another one."""
    if hasattr(like, "_fields"):
        return type(like)(*children)
    return type(like)(children)


def _is_plain_value(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain_value, value))
    return not isinstance(value, Out) and value is not None


def _alias(tensor: Any, given: list[Any]) -> int | None:
    storage = storage_key(tensor)
    for i, each in enumerate(given):
        if storage_key(each) == storage:
            return i
    return None


def _fits(label: Label, tensor: Any, n_samples: int) -> bool:
    """Whether a tensor has the samples where a label says."""
    dims: int = tensor.dim()
    return label.dim < dims and tensor.shape[label.dim] == label.size(n_samples)


def _kind(labels: list[Label], n_outs: int) -> str:
    kinds = {label.kind for label in labels}
    if kinds <= {"shared", "batch"}:
        return "chunk"
    is_term = n_outs == 1 and labels[0].kind in ("sum", "mean", "counted")
    return (
        "term"
        if is_term and {label.kind for label in labels[1:]} <= {"shared", "batch"}
        else "tail"
    )


def _brief(error: Exception) -> str:
    return str(error).partition("\n")[0][:120]
