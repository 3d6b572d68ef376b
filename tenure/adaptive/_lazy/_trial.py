"""Which calls keep samples apart: each is run on a few samples, whole and in two parts.

Invariant: a call is split only if its parts gave what the whole gave. Nothing here has a graph, and
what the calls write or draw is undone.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from tenure._containers import passed_tensors
from tenure._errors import BatchCoupledError, OutOfRetriesError, TenureError
from tenure._oom import oom_info
from tenure.scopes import persist

from .._step import ConstantNumbers
from .._undo import RngState
from ._meta import SHARED, Label, Meta, names
from ._tape import RecordedCall, Tape, Value, Verdict, call, inputs_of, last_uses, mark_data
from ._terms import count_of, reduction_of, whole_of

_MANY = 256
_FEW = 3
# Their kernels take indices unchecked, so that those of other samples write past their memory.
_UNCHECKED = frozenset(
    names("lu_unpack lu_solve linalg_lu_solve ldl_solve linalg_ldl_solve ctc_loss segment_reduce")
)
_UNWRITTEN = frozenset(["empty_like", "new_empty", "new_empty_strided"])
_MIXING = (
    "Pass a smaller batch; freeze a normalization with eval(), or accept "
    'statistics of each micro-batch with step(..., batchnorm="per_chunk"); compute a loss that '
    "compares samples of smaller outputs, or with step(..., loss=...)."
)

_known: dict[Any, list[Verdict]] = {}


def not_splittable(tape: Tape, why: str, mixing: RecordedCall | None = None) -> TenureError:
    """Return the error of a program that has to run whole; a call that mixes samples is named."""
    text = (
        f"What was recorded of {tape.n_samples} samples ran out of memory, and can't be split: "
        f"{why}. Nothing was changed. "
    )
    if mixing is not None:
        return BatchCoupledError(text + _MIXING, (str(mixing),))
    return OutOfRetriesError(
        f"{text}Pass a smaller batch, or say with step() what to do.", (tape.n_samples,)
    )


def mixing_error(tape: Tape, call: RecordedCall, why: str) -> TenureError:
    """Return the error of a call whose results do not fit as a whole."""
    what = f"{call} wants all samples ({why}), and what is computed from there on does not fit"
    return not_splittable(tape, what, call)


def judge(tape: Tape, entries: list[RecordedCall]) -> None:
    """Say of each call what it is in a split: see `Verdict`.

    Raises:
        BatchCoupledError: a call mixes samples, and no memory is left to try what follows.
        OutOfRetriesError: no memory is left to try any.
    """
    if all(entry.verdict is not None for entry in entries):
        return
    mark_data(entries)
    place = {value: i for i, value in enumerate(v for e in entries for v in e.made)}
    key = tuple([(e.shape, e.is_data, *[place.get(v, -1) for v in e.reads]) for e in entries])
    if key not in _known:
        if len(_known) >= _MANY:
            _known.clear()
        _known[key] = _tried(tape, entries)
    for entry, verdict in zip(entries, _known[key], strict=True):
        entry.verdict = verdict
        for value, label in zip(entry.made, verdict.labels, strict=True):
            value.label = label


def _tried(tape: Tape, entries: list[RecordedCall]) -> list[Verdict]:
    devices = {value.meta.device for value in inputs_of(entries)}
    found: list[Verdict] = []
    for n_samples in (_FEW, 2):
        rng = RngState(devices, tape.generators.values())
        rng.begin()
        try:
            with torch.no_grad(), persist(), warnings.catch_warnings():
                # of a deviation of one sample, for one
                warnings.simplefilter("ignore")
                found.clear()
                # those before an error stay
                trial = _Trial(entries, min(n_samples, tape.n_samples), rng)
                found.extend(trial.verdicts())
                return found
        except Exception as error:
            if oom_info(error) is None:
                raise
        finally:
            rng.undo()
    for entry, verdict in zip(entries, found, strict=False):
        if verdict.kind == "before" and verdict.why:
            raise mixing_error(tape, entry, verdict.why)
    raise not_splittable(tape, "two samples of it, tried without gradients, do not fit either")


class _Trial:
    """Recorded calls on a few samples."""

    def __init__(self, entries: list[RecordedCall], n_samples: int, rng: RngState) -> None:
        self._entries, self._n, self._rng = entries, n_samples, rng
        inputs = inputs_of(entries)
        self._labels = {value: value.label for value in inputs}
        self._env: dict[Value, Tensor] = {
            value: value.label.part(value.cut().detach(), 0, n_samples) for value in inputs
        }

    def verdicts(self) -> Iterator[Verdict]:
        """Try all calls in order."""
        last = last_uses(self._entries, ())
        for entry in self._entries:
            yield self._verdict(entry)
            for value in last[entry]:
                self._env.pop(value, None)

    def _verdict(self, entry: RecordedCall) -> Verdict:
        labels = tuple(meta.label for meta in entry.shape.metas)
        given = {v: self._env[v] for v in entry.reads if v in self._env}
        why = entry.shape.why
        if getattr(entry.func, "__name__", "") in _UNCHECKED:
            why = "it does not check indices, so that it is not tried"
        elif _goes_by_place(entry, self._labels):
            why = "it names places among the samples"
        is_known = len(given) == len(entry.reads)
        for freezes in (False, True) if is_known and not why else ():
            try:
                verdict = self._compared(entry, given, freezes)
            except Exception as error:
                if oom_info(error) is not None:
                    raise
                why = why or f"it does not run on a few samples ({str(error)[:120]})"
                continue
            # what is made of the batch alone is reduced at once
            if verdict is None or (entry.is_data and verdict.kind == "term"):
                continue
            if (verdict := self._confirmed(entry, given, verdict)) is not None:
                # what is reduced is not for those that follow
                if verdict.kind == "chunk":
                    made = self._run(entry, self._env, self._n, freezes, tries=False)
                    self._take(entry, made[: len(labels)], verdict.labels)
                return verdict
        if entry.is_data and not entry.shape.changed:
            # it will run on the whole batch, so that any values do here
            self._take(entry, [self._any_value(meta) for meta in entry.shape.metas], labels)
            is_whole = self._gives_all_samples(entry)
            return Verdict("before", (why or "it mixes the samples") if is_whole else "", labels)
        if not entry.is_data:
            for value in [value for value in self._env if value.root in entry.written()]:
                del self._env[value]
        return Verdict("tail", why or ("it mixes the samples" if is_known else ""), labels)

    def _gives_all_samples(self, entry: RecordedCall) -> bool:
        """Return whether a call gives most of what it reads in a form that has no samples."""
        made = sum(math.prod(m.shape) for m in entry.shape.metas if not m.label.is_batch)
        read = sum(math.prod(v.meta.shape) for v in entry.reads if self._labels[v].is_batch)
        return bool(2 * made >= read > 0)

    def _take(self, entry: RecordedCall, made: list[Tensor], labels: tuple[Label, ...]) -> None:
        """Keep what a call gave for those that follow."""
        self._env.update(zip(entry.made, made, strict=True))
        self._labels.update(zip(entry.made, labels, strict=True))

    def _any_value(self, meta: Meta) -> Tensor:
        shape = list(meta.shape)
        if meta.label.is_batch:
            shape[meta.label.dim] = meta.label.size(self._n)
        value = torch.zeros(shape, dtype=meta.dtype, device=meta.device)
        # a logarithm has them, and they are probabilities
        return value.uniform_() if meta.dtype.is_floating_point else value

    def _compared(
        self, entry: RecordedCall, given: dict[Value, Tensor], freezes: bool
    ) -> Verdict | None:
        """Return the verdict on a call; None if its parts do not give what the whole gives."""
        ends = [(0, self._n), (0, 1), (1, self._n)][: min(self._n, 2) + 1]
        pieces = [{v: self._labels[v].part(t, *each) for v, t in given.items()} for each in ends]
        lengths = [end - start for start, end in ends]

        def run() -> list[list[Tensor]]:
            found = []
            for piece, length in zip(pieces, lengths, strict=True):
                self._rng.undo()
                found.append(self._run(entry, piece, length, freezes))
            return found

        whole, *parts = run()
        n_made = len(entry.shape.metas)
        labels = [meta.label for meta in entry.shape.metas]
        labels += [self._labels[entry.reads[i]] for i in entry.shape.changed]
        found = _layouts(labels, whole, parts)
        reads_samples = any(self._labels[v].is_batch for v in given)
        # equal values may be by chance: what has no part for each sample is reduced over them
        may = (
            all(label.is_batch for label in labels)
            or not reads_samples
            or entry.func.__name__.startswith("new_")
        )
        # statistics of parts are others
        may &= not (reads_samples and entry.shape.writes_plain)
        if may and _are_known(found) and found[n_made:] == labels[n_made:]:
            return Verdict("chunk", "", tuple(found[:n_made]), freezes)
        reduces = reduction_of(entry, self._labels)
        if reduces and not entry.shape.changed:
            counts = [
                count_of(entry, reduces, piece.__getitem__, length)
                for piece, length in zip(pieces[1:], lengths[1:], strict=True)
            ]
            if _alike(whole[0], whole_of(reduces, [part[0] for part in parts], counts)):
                return Verdict("term", "", (SHARED,), freezes, reduces)
        sized = all(
            not label.is_batch or value.shape[label.dim :][:1] == (label.size(self._n),)
            for label, value in zip(labels, whole, strict=True)
        )
        if may and sized and self._draws(entry, given, whole, freezes):
            # with one number for all samples, so far as that can be had
            with ConstantNumbers() as numbers:
                whole, *parts = run()
            is_unknown = numbers.has_unknown or entry.func.__name__ in _UNWRITTEN
            if is_unknown or _are_known(_layouts(labels, whole, parts)):
                return Verdict("chunk", "", tuple(labels[:n_made]), freezes)
        return None

    def _draws(
        self, entry: RecordedCall, given: Mapping[Value, Tensor], whole: list[Tensor], freezes: bool
    ) -> bool:
        """Tell whether a call gives something else each time."""
        if getattr(entry.func, "__name__", "") in _UNWRITTEN:
            return True
        again = self._run(entry, given, self._n, freezes)
        return not all(map(_alike, whole, again))

    def _confirmed(
        self, entry: RecordedCall, given: Mapping[Value, Tensor], verdict: Verdict
    ) -> Verdict | None:
        """Return the same of numbers at random: those of a few samples may be alike by chance."""
        drawn = {v: _at_random(t) if self._labels[v].is_batch else t for v, t in given.items()}
        tried = [drawn]
        # a search for numbers among those of other samples, as `torch.isin`, finds none of these
        if all(meta.dtype is torch.bool for meta in entry.shape.metas):
            tried.append(self._met(drawn))
        for each in tried:
            try:
                again = self._compared(entry, each, verdict.freezes)
            except Exception as error:
                if oom_info(error) is not None:
                    raise
                return verdict
            if again is None or again.kind != verdict.kind:
                return None
            verdict = again
        return verdict

    def _met(self, drawn: Mapping[Value, Tensor]) -> dict[Value, Tensor]:
        """Return numbers of which a sample has in other tensors what its neighbour has in one."""
        met, numbers = dict(drawn), None
        for value, t in drawn.items():
            label = self._labels[value]
            if not t.numel() or label.sample_dim is None:
                continue
            rows = label.apart(t).movedim(label.sample_dim, 0)
            if numbers is None:
                numbers = rows.reshape(len(rows), -1)
            else:
                numbers = numbers.roll(1, 0).to(t.dtype)
                columns = torch.arange(rows[0].numel(), device=t.device) % numbers.shape[1]
                rows = numbers[:, columns].reshape(rows.shape)
                met[value] = label.back(rows.movedim(0, label.sample_dim))
        return met

    def _run(
        self, entry: RecordedCall, given: Mapping[Value, Tensor], length: int, freezes: bool,
        *, tries: bool = True,
    ) -> list[Tensor]:  # fmt: skip
        """Return what a call gives, and what it writes into, in order."""
        used = {value: given[value] for value in entry.reads}
        plains = {id(tensor): tensor for tensor in entry.tensors}
        modes = entry.modes._replace(grad=False)
        tensors = (*used.values(), *entry.tensors)
        integers = any(
            not (t.is_floating_point() or t.is_complex() or t.dtype is torch.bool) for t in tensors
        )
        if tries and integers and any(t.device.type != "cpu" for t in tensors):
            # on a device an index out of range ends the process
            used = {value: tensor.cpu() for value, tensor in used.items()}
            plains = {key: tensor.cpu() for key, tensor in plains.items()}
            modes = modes._replace(autocast=())
        if entry.shape.writes_plain:
            plains = {key: tensor.clone() for key, tensor in plains.items()}
        if tries and (entry.shape.changed or entry.shape.writes_plain):
            used = {value: tensor.clone() for value, tensor in used.items()}
        with modes.entered():
            out = call(entry, used.__getitem__, None if freezes else length, plains)
        outs = [*passed_tensors(out)]
        if len(outs) != len(entry.outs):
            raise ValueError(f"it gives {len(outs)} tensors then, and {len(entry.outs)} of all")
        made = [t for v, t in zip(entry.outs, outs, strict=True) if v is not None]
        return made + [used[entry.reads[i]] for i in entry.shape.changed]


def _at_random(value: Tensor) -> Tensor:
    if value.dtype is torch.bool:
        return torch.rand(value.shape, device=value.device) < 0.5
    if value.is_floating_point():
        return torch.rand_like(value)
    if value.is_complex() or not value.numel():
        return value
    # others of the same range: the first numbers of two parts are often equal, as of class indices
    most = torch.iinfo(value.dtype).max - 1
    low, high = min(int(value.min()), 0), min(max(int(value.max()), 1), most)
    made = torch.randint_like(value, low, high + 1)
    # at its ends, or a sum of few zeros would say nothing
    made[(-1,) * made.dim()], made[(0,) * made.dim()] = low, high
    return made


def _goes_by_place(entry: RecordedCall, labels: Mapping[Value, Label]) -> bool:
    """Tell whether a call names places along the samples, of which a few tell nothing."""
    first = entry.args[0] if entry.args else None
    label = labels.get(first, SHARED) if isinstance(first, Value) else SHARED
    name = getattr(entry.func, "__name__", "")
    if not label.is_batch:
        return False
    if name.startswith(("as_strided", "resize")):
        return True
    if name in ("tril", "triu", "tril_", "triu_"):
        # of a matrix
        return (
            any(label.dim >= len(meta.shape) - 2 for meta in entry.shape.metas) or name[-1] == "_"
        )
    if name == "roll":
        dims = entry.kwargs.get("dims", entry.args[2] if len(entry.args) > 2 else None)
        n_dims = len(entry.shape.metas[0].shape)
        along = dims if isinstance(dims, tuple | list) else () if dims is None else (dims,)
        return not along or label.dim in [d % n_dims for d in along]
    if name == "__setitem__":
        index = entry.args[1] if isinstance(entry.args[1], tuple) else (entry.args[1],)
        until = index[: label.dim + 1]
        return any(each is None or each is Ellipsis for each in until) or (
            len(until) > label.dim
            and isinstance(until[-1], int | slice)
            and until[-1] != slice(None)
        )
    return False


def _layouts(
    labels: list[Label], whole: list[Tensor], parts: list[list[Tensor]]
) -> list[Label | None]:
    columns = zip(*parts, strict=True)
    return [_layout(*each) for each in zip(labels, whole, columns, strict=True)]


def _are_known(found: list[Label | None]) -> TypeGuard[list[Label]]:
    return None not in found


def _layout(label: Label, whole: Tensor, parts: Sequence[Tensor]) -> Label | None:
    """Return how the samples of a tensor lie, if those of parts make the whole."""
    if not label.is_batch:
        return label if all(_alike(whole, part) for part in parts) else None
    d, factor = label.dim, label.outer * label.inner
    ways = [(label.outer, label.inner), (1, factor), (factor, 1)]
    ways += [(each, factor // each) for each in range(2, factor) if not factor % each]
    for outer, inner in ways:
        way = Label(d, outer, inner)
        if any(part.dim() <= d or part.shape[d] % factor for part in parts):
            return None
        if len({(*part.shape[:d], *part.shape[d + 1 :]) for part in parts}) > 1:
            return None
        if _alike(whole, way.joined(parts)):
            return way
    return None


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
