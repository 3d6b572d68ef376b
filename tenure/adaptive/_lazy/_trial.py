"""Find the calls that keep samples apart: run each on a few random samples, whole and in two.

Invariant: a call is split only if its parts gave what the whole gave. Nothing here has a graph, and
what the calls write or draw is undone. The numbers are drawn, because those of the first samples of
a batch may be alike.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tenure._callers import without_warnings
from tenure._oom import oom_info
from tenure.scopes import persist

from .._step import ConstantNumbers
from .._undo import RngState
from ._meta import SHARED, Label, names
from ._tape import RecordedCall, Value, made_by

Get = Callable[[Value], Any]

# Their kernels take indices unchecked, so that those of other samples write past their memory.
_UNCHECKED = names(
    "lu_unpack lu_solve linalg_lu_solve ldl_solve linalg_ldl_solve ctc_loss segment_reduce"
)
_UNWRITTEN = names("empty_like new_empty new_empty_strided")


class Verdict(NamedTuple):
    """The part of a call in a split.

    Attributes:
        kind: ``"apart"``: keeps samples apart; ``"term"``: reduces over them; ``"mixes"``: neither.
        why: what makes it want all of the batch.
        labels: where the tensors that it makes have the samples.
        freezes: whether sizes are taken as the numbers that they were.
        reduces: how a term reduces: ``"sum"``, ``"mean"`` or ``"counted"``.
    """

    kind: str
    why: str
    labels: tuple[Label, ...]
    freezes: bool = False
    reduces: str = ""


def judge(entry: RecordedCall, n_samples: int, rng: RngState) -> None:
    """Find what a call is in a split, which is known from then on of calls that are alike.

    Raises:
        Exception: no memory is left to try it.
    """
    known, key = entry.shape.verdicts, tuple(value.label for value in entry.reads)
    if key not in known:
        mixes = Verdict("mixes", "", tuple(meta.label for meta in entry.shape.metas))
        why = entry.shape.why
        if entry.name in _UNCHECKED:
            why = "it does not check indices, so that it is not tried"
        elif _goes_by_place(entry):
            why = "it names places among the samples"
        try:
            found = None if why else _tried(entry, min(3, n_samples), rng)
        except Exception as error:
            if oom_info(error) is None:
                raise
            found = _tried(entry, min(2, n_samples), rng)
        if found is None or isinstance(found, str):
            found = mixes._replace(why=why or found or "it mixes the samples")
        known[key] = found
    verdict: Verdict = known[key]
    entry.verdict = verdict
    for value, label in zip(entry.made, verdict.labels, strict=True):
        value.label = label


def _tried(entry: RecordedCall, n_samples: int, rng: RngState) -> Verdict | str | None:
    why = None
    with torch.no_grad(), persist(), without_warnings():
        for freezes in (False, True):
            try:
                verdict = _Trial(entry, n_samples, freezes, rng).verdict()
            except Exception as error:
                if oom_info(error) is not None:
                    raise
                why = why or f"it does not run on a few samples ({str(error)[:120]})"
                continue
            finally:
                rng.undo()
            if verdict is not None:
                return verdict
    return why


class _Trial:
    """A call on a few samples."""

    def __init__(self, entry: RecordedCall, n_samples: int, freezes: bool, rng: RngState) -> None:
        self._entry, self._n, self._freezes, self._rng = entry, n_samples, freezes, rng
        shape, reads = entry.shape, entry.reads
        self._n_made = len(shape.aliases)
        labels = [meta.label for meta in shape.metas[: self._n_made]]
        self._labels = [*labels, *(reads[i].label for i in shape.changed)]
        has_samples = any(value.label.is_batch for value in reads)
        # equal values may be by chance: what has no part for each sample is reduced over them
        self._may_be_apart = (
            all(label.is_batch for label in self._labels)
            or not has_samples
            or entry.name.startswith("new_")
        )
        # statistics of parts are others
        self._may_be_apart &= not (has_samples and shape.writes_plain)
        metas: list[Any] = [*(value.meta for value in reads), *entry.tensors]
        indexes = any(not (m.dtype.is_floating_point or m.dtype.is_complex) for m in metas)
        # on a device an index out of range ends the process
        self._on_host = indexes and any(meta.device.type != "cpu" for meta in metas)

    def verdict(self) -> Verdict | None:
        """Return what all draws of numbers agree on; None if they do not."""
        # what is searched for among other samples is seen only if numbers are met again
        meets = all(meta.dtype is torch.bool for meta in self._entry.shape.metas)
        has_floats = any(v.meta.dtype.is_floating_point for v in self._entry.reads)
        found: Verdict | None = None
        failed: Exception | None = None
        for i in range(8 if meets or not has_floats else 2):
            try:
                verdict = self._compared(i, meets=meets and i > 0)
            except Exception as error:
                if oom_info(error) is not None:
                    raise
                failed = error
                continue
            if verdict is None or (found is not None and found.kind != verdict.kind):
                return None
            found = verdict
        if found is None and failed is not None:
            raise failed
        return found

    def _compared(self, seed: int, *, meets: bool) -> Verdict | None:
        """Return the verdict on a call; None if its parts do not give what the whole gives."""
        entry, n, labels = self._entry, self._n, self._labels
        generator = torch.Generator().manual_seed(seed)
        drawn = {v: _drawn(v, n, generator, seed % 2, meets) for v in entry.reads}
        if self._on_host:
            drawn = {value: tensor.cpu() for value, tensor in drawn.items()}
        ends = [(0, n), (0, 1), (1, n)][: min(n, 2) + 1]
        pieces = [{v: _part(v.label, t, *each) for v, t in drawn.items()} for each in ends]
        lengths = [end - start for start, end in ends]

        def results() -> list[list[Tensor]]:
            found = []
            for piece, length in zip(pieces, lengths, strict=True):
                self._rng.undo()
                found.append(self._run(piece, length))
            return found

        whole, *parts = results()
        draws = self._rng.has_drawn() or entry.name in _UNWRITTEN
        if self._may_be_apart and (found := self._layouts(whole, parts)) is not None:
            return Verdict("apart", "", found, self._freezes)
        reduces = _reduction_of(entry)
        if reduces and not entry.shape.changed:
            counts = [
                count_of(entry, reduces, piece.__getitem__, length)
                for piece, length in zip(pieces[1:], lengths[1:], strict=True)
            ]
            if _alike(whole[0], whole_of(reduces, [part[0] for part in parts], counts)):
                return Verdict("term", "", (SHARED,), self._freezes, reduces)
        sized = all(
            not label.is_batch or value.shape[label.dim :][:1] == (label.size(n),)
            for label, value in zip(labels, whole, strict=True)
        )
        if self._may_be_apart and sized and draws:
            # with one number for all samples, so far as that can be had
            with ConstantNumbers() as numbers:
                whole, *parts = results()
            is_unknown = numbers.has_unknown or entry.name in _UNWRITTEN
            if is_unknown or self._layouts(whole, parts) is not None:
                return Verdict("apart", "", tuple(labels), self._freezes)
        return None

    def _run(self, given: Mapping[Value, Tensor], length: int) -> list[Tensor]:
        """Return what a call gives, and what it writes into, in order."""
        entry, shape = self._entry, self._entry.shape
        used, modes = dict(given), entry.modes._replace(grad=False, inference=False)
        plains = {id(tensor): tensor for tensor in entry.tensors}
        if self._on_host:
            plains = {key: tensor.cpu() for key, tensor in plains.items()}
            modes = modes._replace(autocast=())
        if shape.writes_plain:
            plains = {key: tensor.clone() for key, tensor in plains.items()}
        if shape.changed or shape.writes_plain:
            used = {value: tensor.clone() for value, tensor in used.items()}
        with modes.entered():
            out = entry.call(used.__getitem__, None if self._freezes else length, plains)
        return made_by(entry, out, used)

    def _layouts(self, whole: list[Tensor], parts: list[list[Tensor]]) -> tuple[Label, ...] | None:
        """Return how the samples lie in what a call makes; None if parts do not make the whole."""
        columns = zip(self._labels, whole, zip(*parts, strict=True), strict=True)
        found = [_layout(*each) for each in columns]
        known = tuple(label for label in found if label is not None)
        is_kept = list(known[self._n_made :]) == self._labels[self._n_made :]
        return known if len(known) == len(found) and is_kept else None


def _part(label: Label, value: Tensor, start: int, end: int) -> Tensor:
    if label.sample_dim is None:
        return value
    return label.back(label.apart(value).narrow(label.sample_dim, start, end - start))


def _drawn(
    value: Value, n_samples: int, generator: torch.Generator, is_odd: int, meets: bool
) -> Tensor:
    """Return numbers of the kind of a value's, for a few samples; what they share as it is."""
    meta, known = value.meta, value.tensor
    if known is not None and not value.label.is_batch:
        return known.detach()
    shape, dtype = meta.shape_at(n_samples), meta.dtype
    if dtype.is_floating_point and meets:
        made = torch.randint(0, 2, shape, generator=generator)
    elif dtype.is_floating_point or dtype.is_complex:
        wide = dtype if dtype.is_complex or dtype is torch.float64 else torch.float32
        draw: Any = torch.randn if is_odd else torch.rand
        made = draw(shape, dtype=wide, generator=generator)
    else:
        # of the batch's own, as of class indices, and of those that all such numbers may be
        own = torch.tensor([0, 1, 2][: 2 + is_odd])
        if known is not None and known.numel():
            own = known.detach().flatten()[:1024].cpu().long()
            own = own if is_odd else torch.cat([own, torch.tensor([0, 1])])
        made = own[torch.randint(0, len(own), shape, generator=generator)]
        if made.numel():
            # at its ends, or a sum of few zeros would say nothing
            low, high = (own.min(), own.max()) if is_odd else (own.max(), own.min())
            made[(0,) * made.dim()], made[(-1,) * made.dim()] = low, high
    return made.to(dtype=dtype, device=meta.device)


def _goes_by_place(entry: RecordedCall) -> bool:
    """Tell whether a call names places along the samples, of which a few tell nothing."""
    first, name = entry.args[0] if entry.args else None, entry.name
    if not isinstance(first, Value) or not first.label.is_batch:
        return False
    label, n_dims = first.label, len(first.meta.shape)
    if name in ("tril", "triu", "tril_", "triu_"):
        # of a matrix
        return label.dim >= n_dims - 2
    if name == "roll":
        dims = entry.kwargs.get("dims", entry.args[2] if len(entry.args) > 2 else ())
        along = dims if isinstance(dims, tuple | list) else (dims,)
        return not along or label.dim in [d % n_dims for d in along]
    if name == "__setitem__":
        index = entry.args[1] if isinstance(entry.args[1], tuple) else (entry.args[1],)
        until = index[: label.dim + 1]
        return any(each is None or each is Ellipsis for each in until) or (
            len(until) > label.dim
            and isinstance(until[-1], int | slice)
            and until[-1] != slice(None)
        )
    return name.startswith(("as_strided", "resize"))


def _layout(label: Label, whole: Tensor, parts: Sequence[Tensor]) -> Label | None:
    """Return how the samples of a tensor lie, if those of parts make the whole."""
    if not label.is_batch:
        return label if all(_alike(whole, part) for part in parts) else None
    d, factor = label.dim, label.outer * label.inner
    if any(part.dim() <= d or part.shape[d] % factor for part in parts):
        return None
    if len({(*part.shape[:d], *part.shape[d + 1 :]) for part in parts}) > 1:
        return None
    ways = [label, *(Label(d, i, factor // i) for i in range(1, factor + 1) if not factor % i)]
    return next((way for way in ways if _alike(whole, way.joined(parts))), None)


def _alike(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    tolerance = torch.finfo(one.dtype).eps ** 0.5
    sizes = other.abs().double() if other.dtype is torch.float64 else other.abs().float()
    sizes = sizes[sizes > 0]
    # masks are far larger than what they are added to
    scale = float(sizes.kthvalue(1 + sizes.numel() // 4).values) if sizes.numel() else 0.0
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


# --- what a loss is over samples: a mean, a sum, or a mean over labels

_COUNTED = (F.cross_entropy, F.nll_loss)
_LOSSES = names("""
    mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy soft_margin_loss kl_div
    binary_cross_entropy_with_logits poisson_nll_loss gaussian_nll_loss cosine_embedding_loss
    margin_ranking_loss hinge_embedding_loss triplet_margin_loss multilabel_soft_margin_loss
    multilabel_margin_loss multi_margin_loss cross_entropy nll_loss
    """)
_signature_of = lru_cache(64)(inspect.signature)


def _bound(entry: RecordedCall) -> dict[str, Any]:
    return _signature_of(entry.func).bind(*entry.args, **entry.kwargs).arguments


def _reduction_of(entry: RecordedCall) -> str:
    """Return the reduction that a call names: ``"sum"``, ``"mean"``, ``"counted"``, or nothing."""
    metas, name = entry.shape.metas, entry.name
    if len(metas) != 1 or metas[0].shape:
        return ""
    if name in ("sum", "mean"):
        return name
    if name not in _LOSSES:
        return ""
    given = _bound(entry)
    if given.get("reduce") is not None or given.get("size_average") is not None:
        return ""
    reduction: str = given.get("reduction", "mean")
    if reduction == "mean" and entry.func in _COUNTED:
        return "counted"
    # the weights of some losses divide their mean
    if given.get("weight") is not None:
        return ""
    if reduction == "batchmean":
        # it divides by the size of the first dimension, which may be one of time
        return "mean" if getattr(given["input"], "label", SHARED).dim == 0 else "sum"
    return reduction if reduction in ("sum", "mean") else ""


def count_of(entry: RecordedCall, reduces: str, get: Get, n_samples: int) -> Any:
    """Return what a term divides by.

    Args:
        entry: the call.
        reduces: its reduction.
        get: gives the tensor of a value.
        n_samples: how many samples there are.
    """
    if reduces != "counted":
        return n_samples
    given = _bound(entry)
    target: Any
    weight: Any
    target, weight = (
        get(each) if type(each) is Value else each
        for each in (given.get("target"), given.get("weight"))
    )
    # classes with probabilities: a mean over samples
    if target.is_floating_point():
        return n_samples
    with torch.no_grad():
        valid = target != given.get("ignore_index", -100)
        if weight is None:
            return valid.sum()
        return (weight.to(target.device)[torch.where(valid, target, 0)] * valid).sum()


def reads_of_count(entry: RecordedCall) -> list[Value]:
    """Return the recorded values that the count is made of, if a call is a term that has one."""
    is_counted = entry.verdict is not None and entry.verdict.reduces == "counted"
    given = _bound(entry) if is_counted else {}
    values = (given.get("target"), given.get("weight"))
    return [value for value in values if type(value) is Value]


def whole_of(reduces: str, values: list[Tensor], counts: list[Any]) -> Tensor:
    """Return the value of a term, by its values for parts and what these divide by."""
    if reduces == "sum":
        return torch.stack(values).sum(0)
    weights = torch.stack([torch.as_tensor(each, device=values[0].device) for each in counts])
    # the mean of nothing is nan
    weighted = torch.where(weights > 0, widened(torch.stack(values)) * weights, 0)
    return (weighted.sum(0) / weights.sum(0)).to(values[0].dtype)


def widened(value: Tensor) -> Tensor:
    """Return a number in a precision in which sums of several are made."""
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
