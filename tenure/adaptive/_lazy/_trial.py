"""Which calls keep samples apart: each is run on a few samples, whole and in two parts.

Invariant: a call is split only if its parts gave what the whole gave. Nothing here has a graph, and
what the calls write or draw is undone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tenure._oom import oom_info
from tenure.scopes import persist

from .._undo import RngState
from ._meta import SHARED, Label, Meta, names
from ._replay import filled, flat_tensors, replayed
from ._shapes import with_tensors
from ._tape import RecordedCall, Ref, Tape, Verdict
from ._terms import count_of, reduction_of, whole_of

_MANY = 256
_FEW = 3
# Their kernels take indices unchecked, so that those of other samples write past their memory.
_UNCHECKED = frozenset(
    names("lu_unpack lu_solve linalg_lu_solve ldl_solve linalg_ldl_solve ctc_loss segment_reduce")
)
_UNWRITTEN = frozenset(["empty_like", "new_empty", "new_empty_strided"])

_known: dict[Any, list[Verdict]] = {}


class NotSplittableError(Exception):
    """The recorded program has to run whole; says why, and whether a call mixes the samples."""

    def __init__(self, why: str, mixing: str | None = None) -> None:
        super().__init__(why)
        self.mixing = mixing


def judge(tape: Tape) -> None:
    """Say of each call what it is in a split: see `Verdict`.

    Raises:
        NotSplittableError: no memory is left to try that.
    """
    entries = tape.entries
    if all(entry.verdict is not None for entry in entries):
        return
    place = {n: i for i, n in enumerate(n for e in entries for n in e.made)}
    key = tuple([(e.shape, *[place.get(n, -1) for n in e.reads]) for e in entries])
    if key not in _known:
        if len(_known) >= _MANY:
            _known.clear()
        _known[key] = _tried(tape)
    for entry, verdict in zip(entries, _known[key], strict=True):
        entry.verdict = verdict


def _tried(tape: Tape) -> list[Verdict]:
    devices = {leaf.value.device for leaf in tape.leaves.values()} if tape.kind != "cpu" else ()
    for n_samples in (_FEW, 2):
        rng = RngState(devices, tape.generators.values())
        rng.begin()
        try:
            with torch.no_grad(), persist():
                return _Trial(tape, min(n_samples, tape.n_samples)).verdicts()
        except Exception as error:
            if oom_info(error) is None:
                raise
        finally:
            rng.undo()
    raise NotSplittableError("two samples of it, tried without gradients, do not fit either")


class _Result(NamedTuple):
    """What a call gave, and what it wrote into, in order."""

    made: list[Tensor]
    written: list[Tensor]


class _Trial:
    """A recorded program on a few samples."""

    def __init__(self, tape: Tape, n_samples: int) -> None:
        self._tape, self._n = tape, n_samples
        self._labels = {n: leaf.label for n, leaf in tape.leaves.items()}
        self._env: dict[int, Tensor] = {}
        for n, leaf in tape.leaves.items():
            few = leaf.label.part(leaf.value.detach(), 0, n_samples)
            self._env[n] = few.clone() if n in tape.written else few
        self._alone = of_data(tape)

    def verdicts(self) -> list[Verdict]:
        """Try all calls in order."""
        found = []
        what = replayed(self._tape.entries, ())
        for entry, last in zip(what.entries, what.last, strict=True):
            found.append(self._verdict(entry))
            for number in last:
                self._env.pop(number, None)
        return found

    def _verdict(self, entry: RecordedCall) -> Verdict:
        metas = entry.shape.metas
        labels = tuple(meta.label for meta in metas)
        given = {n: self._env[n] for n in entry.reads if n in self._env}
        kind, why = entry.shape.kind, entry.shape.why
        if getattr(entry.func, "__name__", "") in _UNCHECKED:
            kind, why = "tail", "it does not check indices, so that it is not tried"
        elif _goes_by_place(entry, self._labels):
            kind, why = "tail", "it names places among the samples"
        if len(given) == len(set(entry.reads)) and kind != "tail":
            why = ""
            for freezes in (False, True):
                try:
                    verdict = self._compared(entry, given, freezes)
                except Exception as error:
                    if oom_info(error) is not None:
                        raise
                    why = why or f"it does not run on a few samples ({str(error)[:120]})"
                    continue
                if verdict is not None and not (kind and verdict.kind != "chunk"):
                    verdict = self._confirmed(entry, given, verdict)
                if verdict is not None and not (kind and verdict.kind != "chunk"):
                    self._take(entry, verdict)
                    return verdict
            why = why or "it mixes the samples"
        if entry in self._alone and not entry.shape.changed:
            # it will run on the whole batch, so that any values do here
            self._env.update(zip(entry.made, self._values(entry), strict=True))
            self._labels.update(zip(entry.made, labels, strict=True))
            return Verdict("before", "", labels)
        if entry not in self._alone:
            views = self._tape.views
            groups = entry.written(views)
            for number in [n for n in self._env if views.get(n, n) in groups]:
                del self._env[number]
        return Verdict("tail", why, labels)

    def _written(self, entry: RecordedCall) -> list[int]:
        reads = list(dict.fromkeys(entry.reads))
        return [reads[i] for i in entry.shape.changed]

    def _take(self, entry: RecordedCall, verdict: Verdict) -> None:
        """Run a call for those that follow; what is reduced is not for them."""
        if verdict.kind == "chunk":
            made, _ = self._run(entry, self._env, self._n, verdict.freezes, tries=False)
            self._env.update(zip(entry.made, made, strict=True))
            self._labels.update(zip(entry.made, verdict.labels, strict=True))

    def _values(self, entry: RecordedCall) -> list[Tensor]:
        """Values such as a call on the whole batch gives."""
        wanted = [self._any_value(meta) for meta in entry.shape.metas]
        try:
            made, _ = self._run(entry, self._env, self._n, freezes=False)
        except Exception as error:
            if oom_info(error) is not None:
                raise
            return wanted
        shapes = [each.shape for each in wanted]
        return made if [each.shape for each in made] == shapes else wanted

    def _any_value(self, meta: Meta) -> Tensor:
        shape = list(meta.shape)
        if meta.label.is_batch:
            shape[meta.label.dim] = meta.label.size(self._n)
        value = torch.zeros(shape, dtype=meta.dtype, device=meta.device)
        return value.normal_() if meta.dtype.is_floating_point else value

    def _compared(
        self, entry: RecordedCall, given: dict[int, Tensor], freezes: bool
    ) -> Verdict | None:
        """Return the verdict on a call; None if its parts do not give what the whole gives."""
        ends = ((0, 1), (1, self._n)) if self._n > 1 else ((0, 1),)
        pieces = [{n: self._labels[n].part(t, *each) for n, t in given.items()} for each in ends]
        whole = self._run(entry, given, self._n, freezes)
        parts = [
            self._run(entry, piece, end - start, freezes)
            for piece, (start, end) in zip(pieces, ends, strict=True)
        ]
        wanted = [meta.label for meta in entry.shape.metas]
        writes = [self._labels[n] for n in self._written(entry)]
        labels = [
            _layout(label, value, [part.made[i] for part in parts])
            for i, (label, value) in enumerate(zip(wanted, whole.made, strict=True))
        ]
        same = [
            _layout(label, value, [part.written[i] for part in parts]) == label
            for i, (label, value) in enumerate(zip(writes, whole.written, strict=True))
        ]
        found = tuple(label for label in labels if label is not None)
        reads_samples = any(self._labels[n].is_batch for n in given)
        scales = all(label.is_batch for label in (*wanted, *writes))
        # equal values may be by chance: what has no part for each sample is reduced over them
        may = scales or not reads_samples or entry.func.__name__.startswith("new_")
        # statistics of parts are others
        may &= not (reads_samples and entry.shape.writes_plain)
        if may and all(same) and len(found) == len(labels):
            return Verdict("chunk", "", found, freezes)
        reduces = reduction_of(entry, self._labels)
        if reduces and not entry.shape.changed:
            counts = [
                count_of(entry, reduces, piece.__getitem__, end - start)
                for piece, (start, end) in zip(pieces, ends, strict=True)
            ]
            values = [part.made[0] for part in parts]
            if _alike(whole.made[0], whole_of(reduces, values, counts)):
                return Verdict("term", "", (SHARED,), freezes, reduces)
        sized = all(
            not label.is_batch or value.shape[label.dim :][:1] == (label.size(self._n),)
            for label, value in zip((*wanted, *writes), (*whole.made, *whole.written), strict=True)
        )
        if may and sized and self._draws(entry, given, whole, freezes):
            return Verdict("chunk", "", tuple(wanted), freezes)
        return None

    def _draws(
        self, entry: RecordedCall, given: Mapping[int, Tensor], whole: _Result, freezes: bool
    ) -> bool:
        """Tell whether a call gives something else each time."""
        if getattr(entry.func, "__name__", "") in _UNWRITTEN:
            return True
        again = self._run(entry, given, self._n, freezes)
        pairs = zip((*whole.made, *whole.written), (*again.made, *again.written), strict=True)
        return not all(_alike(one, other) for one, other in pairs)

    def _confirmed(
        self, entry: RecordedCall, given: Mapping[int, Tensor], verdict: Verdict
    ) -> Verdict | None:
        """Return the same of numbers at random: those of a few samples may be alike by chance."""
        drawn = {n: _at_random(t) if self._labels[n].is_batch else t for n, t in given.items()}
        try:
            again = self._compared(entry, drawn, verdict.freezes)
        except Exception as error:
            if oom_info(error) is not None:
                raise
            return verdict
        return again if again is not None and again.kind == verdict.kind else None

    def _run(
        self, entry: RecordedCall, given: Mapping[int, Tensor], length: int, freezes: bool,
        *, tries: bool = True,
    ) -> _Result:  # fmt: skip
        plains = entry.tensors
        used = {n: given[n] for n in dict.fromkeys(entry.reads)}
        swap: dict[int, Tensor] = {}
        modes = entry.modes._replace(grad=False)
        integers = any(
            not (t.is_floating_point() or t.is_complex() or t.dtype is torch.bool)
            for t in (*used.values(), *plains)
        )
        if tries and integers and self._tape.kind != "cpu":
            # on a device an index out of range ends the process
            used = {n: tensor.cpu() for n, tensor in used.items()}
            swap = {id(tensor): tensor.cpu() for tensor in plains}
            modes = modes._replace(autocast=())
        if entry.shape.writes_plain:
            swap = {id(tensor): tensor.clone() for tensor in plains}
        if tries and (entry.shape.changed or entry.shape.writes_plain):
            used = {n: tensor.clone() for n, tensor in used.items()}
        size = None if freezes else length
        with modes.entered(self._tape.kind):
            args, kwargs = (
                with_tensors(filled(each, used.__getitem__, size), swap)
                for each in (entry.args, entry.kwargs)
            )
            out = flat_tensors(entry.func(*args, **kwargs))
        made = [t for n, t in zip(entry.outs, out, strict=True) if n is not None]
        return _Result(made, [used[n] for n in self._written(entry)])


def _at_random(value: Tensor) -> Tensor:
    if value.dtype is torch.bool:
        return torch.rand(value.shape, device=value.device) < 0.5
    return torch.rand_like(value) if value.is_floating_point() else value


def _goes_by_place(entry: RecordedCall, labels: Mapping[int, Label]) -> bool:
    """Tell whether a call names places along the samples, of which a few tell nothing."""
    first = entry.args[0] if entry.args else None
    label = labels.get(first.number, SHARED) if isinstance(first, Ref) else SHARED
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


def _layout(label: Label, whole: Tensor, parts: list[Tensor]) -> Label | None:
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


def of_data(tape: Tape) -> set[RecordedCall]:
    """Return the calls that make something of the batch alone."""
    data = {n for n, leaf in tape.leaves.items() if not leaf.value.requires_grad}
    found = set()
    for entry in tape.entries:
        metas = (*entry.shape.metas, *entry.shape.changed.values())
        plains = entry.tensors
        if (
            data.issuperset(entry.reads)
            and not any(meta.requires_grad for meta in metas)
            and not any(t.requires_grad or isinstance(t, nn.Parameter) for t in plains)
        ):
            found.add(entry)
            data.update(entry.made)
        elif written := entry.written(tape.views):
            data = {n for n in data if tape.views.get(n, n) not in written}
    return found
