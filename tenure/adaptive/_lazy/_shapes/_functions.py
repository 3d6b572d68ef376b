"""Functions that are known as a whole, not by their operators: losses, recurrent layers, norms."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from .._labels import MIXED, SHARED, Label, label_of, set_label
from .._tape import flat_tensors

NORMALIZATIONS = frozenset({F.batch_norm, torch.batch_norm, F.instance_norm})
"""They write into buffers, which is seen when they run."""


_TRAINING = 5


def trains_statistics(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call is of a normalization that writes its buffers."""
    if func not in NORMALIZATIONS:
        return False
    by_name = kwargs.get("training", kwargs.get("use_input_stats"))
    # torch tells nobody that they are written
    return bool(args[_TRAINING] if len(args) > _TRAINING else by_name)


def unreduced(func: Any, args: Any, kwargs: Any) -> tuple[str, dict[str, Any]]:
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
        return "", {"reduction": reduction}
    if reduction == "mean" and name in ("cross_entropy", "nll_loss"):
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


def special(func: Any) -> Callable[..., Any] | None:
    """What stands for a function while it is followed; None: itself."""
    if func is F.kl_div:
        return _labelled_kl_div
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


def _labelled_kl_div(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("reduction") != "batchmean":
        return F.kl_div(source, target, *args, **kwargs)
    out = F.kl_div(source, target, *args, **{**kwargs, "reduction": "none"})
    label = label_of(source)
    if label_of(out).is_batch:
        # it divides by the size of the first dimension, which may be one of time
        set_label(out, Label("mean" if label.is_batch and not label.dim else "sum"))
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
