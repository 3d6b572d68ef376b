"""A prediction step in pieces: outputs are put together, and the loss is that of the whole batch.

Invariant: what comes back is what the whole batch gives, or an error; outputs of pieces wait on the
host, so that they do not stand beside what the next piece needs.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tenure import adaptive
from tenure._containers import mapped, tensors_in
from tenure._errors import SplitMismatchError
from tenure._text import describe_tensor

from .._joined import joined_rows, levels_of

Weight = Callable[[Any], Any]
"""Gets a part of a batch, and returns how much it counts in a mean."""
Weights = Mapping[str, Weight | None]
"""What a loss may be a mean over, by name, the likeliest first; None for a sum."""
Predict = Callable[..., tuple[Any, Any, Any]]
"""Gets a part of a batch, and ``loss_only=``; returns the loss, the logits and the labels."""

_PADDING = -100
DECLARED = "declared"
"""The name of the weight that `adaptive_options` has."""
# relative errors in float64, float32 and less; a loss near zero is off by those of the logits
_LOSS_RTOL = (1e-9, 2e-5, 1e-2)
_OUTPUT_RTOL = (1e-9, 1e-4, 5e-2)
_OF_LOGITS = 1e-2
# rounding may change single labels or tokens, or the rest of a generated sequence
_OTHER_LABELS = 0.25
# A weight is wrong if its mean is off by so many times as much as another's, and not by rounding.
_CLEARLY = 10
_ROUNDING = 1e-7
_PLAIN = (bool, int, float, str, type(None))


class UncuttableError(Exception):
    """A batch can't be cut into pieces; says why."""


class Batch:
    """What a collator made, by samples.

    Args:
        inputs: tensors by name, and plain values.
        in_dims: where its samples are, as of `step`.

    Attributes:
        inputs: as they were given.
        n_samples: how many samples they have.

    Raises:
        UncuttableError: there is no telling what belongs to which sample.
    """

    def __init__(self, inputs: Any, in_dims: Any) -> None:
        if not isinstance(inputs, Mapping):
            raise UncuttableError(
                f"The batch is a {type(inputs).__name__}, and no dict of tensors."
            )
        self.inputs = inputs
        self._in_dims = in_dims
        self._dims = {key: _dim_of(key, value, in_dims) for key, value in inputs.items()}
        lengths = {
            key: len(inputs[key]) if dim == "items" else inputs[key].shape[dim]
            for key, dim in self._dims.items()
            if dim is not None
        }
        if len(set(lengths.values())) != 1:
            raise UncuttableError(f"Its parts have other numbers of samples: {lengths}.")
        (self.n_samples,) = set(lengths.values())

    def part(self, start: int, end: int) -> Any:
        """Return the samples from one to another."""
        cut = {key: self._cut(key, start, end) for key in self.inputs}
        return type(self.inputs)(cut)  # type: ignore[call-arg]  # as the Trainer itself makes it

    def few(self, n: int) -> Batch:
        """Return so many samples that differ most."""
        # the ends of each tensor tell most about a loss; labels before measurements
        leaves = [(self.inputs[key], dim) for key, dim in self._dims.items() if type(dim) is int]
        leaves.sort(key=lambda leaf: leaf[0].is_floating_point())
        values = [value.detach().real.movedim(dim, 0).unsqueeze(-1) for value, dim in leaves]
        columns = [each.flatten(1).sum(1).argsort().tolist() for each in values]
        columns.append(list(range(self.n_samples)))
        low: list[int] = []
        high: list[int] = []
        for i, order in itertools.product(range(self.n_samples), columns):
            for side, index in ((low, order[i]), (high, order[-1 - i])):
                if index not in low + high and len(side) < n // 2:
                    side.append(index)
        chosen = low + high[::-1]
        rows = dict(self.inputs)
        for key, dim in self._dims.items():
            value = self.inputs[key]
            if dim == "items":
                rows[key] = [value[i] for i in chosen]
            elif dim is not None:
                index = torch.tensor(chosen, device=value.device)
                rows[key] = value.index_select(dim, index)
        return Batch(type(self.inputs)(rows), self._in_dims)  # type: ignore[call-arg]

    def _cut(self, key: Any, start: int, end: int) -> Any:
        value, dim = self.inputs[key], self._dims[key]
        if dim is None:
            return value
        return value[start:end] if dim == "items" else value.narrow(dim, start, end - start)


def _dim_of(key: Any, value: Any, in_dims: Any) -> Any:
    dim = in_dims.get(key, 0) if isinstance(in_dims, Mapping) else in_dims
    if isinstance(value, Tensor):
        return dim if value.dim() else None
    if dim is None or dim == "items" or isinstance(value, _PLAIN):
        return dim if dim == "items" else None
    raise UncuttableError(
        f"{key!r} is a {type(value).__name__}, which may belong to samples or not."
    )


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """Restore torch's generators, so that a comparison changes no random numbers of the program."""
    device = torch.accelerator.current_accelerator(check_available=True)
    module: Any = None if device is None else torch.get_device_module(device)
    # asking a device that is not used yet would start it
    is_used = getattr(module, "is_initialized", bool)()
    devices = range(module.device_count() if is_used else 0)
    with torch.random.fork_rng(devices, device_type="cuda" if device is None else device.type):
        yield


class _PredictedPiece(NamedTuple):
    start: int
    end: int
    loss: Any
    logits: Any
    labels: Any


class PredictionInPieces:
    """The prediction steps of one trainer.

    Args:
        name: what events call them.
    """

    def __init__(self, name: str) -> None:
        def work(
            start: int, end: int, run: Callable[[int, int], _PredictedPiece]
        ) -> _PredictedPiece:
            return run(start, end)

        work.__name__ = work.__qualname__ = name
        self._possible: list[str] | None = None
        self._types: set[torch.dtype] = set()
        # of an object, so that another trainer learns its own sizes
        self._run = adaptive.range(collect="list", restore_rng=True, context=self)(work)

    def __call__(
        self,
        predict: Predict,
        batch: Batch,
        weights: Callable[[], Weights],
        types: Callable[[], set[torch.dtype]],
    ) -> tuple[Any, Any, Any]:
        """Run one.

        Args:
            predict: does it for a part.
            batch: the batch.
            weights: tells what its loss may be a mean over; asked where there are pieces.
            types: tells in what the model computes; asked the first time.

        Returns:
            What ``predict`` gives for the whole; of pieces on the host.

        Raises:
            OutOfRetriesError: not even one sample fits.
            SplitMismatchError: the whole can't be told from the pieces.
        """

        def run(start: int, end: int) -> _PredictedPiece:
            if end - start == batch.n_samples:
                # as the trainer got it
                return _PredictedPiece(start, end, *predict(batch.inputs))
            return _PredictedPiece(start, end, *mapped(Tensor.cpu, predict(batch.part(start, end))))

        pieces: list[_PredictedPiece] = self._run(0, batch.n_samples, run)
        first = pieces[0]
        if len(pieces) == 1:
            return first.loss, first.logits, first.labels
        counts = {} if first.loss is None else weights()
        if self._possible is None:
            self._types, self._possible = types(), list(counts)
            self._compare_few(predict, batch, counts)
        loss = None
        if first.loss is not None:
            loss = self._loss(pieces, predict, batch, counts)
        lengths = [piece.end - piece.start for piece in pieces]
        logits = _joined([piece.logits for piece in pieces], lengths)
        return loss, logits, _joined([piece.labels for piece in pieces], lengths)

    def forget(self) -> None:
        """Forget how the loss adds up, because another evaluation may have different data."""
        self._possible = None

    def _loss(
        self,
        pieces: Sequence[_PredictedPiece],
        predict: Predict,
        batch: Batch,
        weights: Weights,
    ) -> Tensor:
        losses = [piece.loss for piece in pieces]
        # of what was ruled out before nothing is asked; names may be others where labels are
        known = [name for name in self._possible or () if name in weights]
        self._possible = known or list(weights)
        parts = [batch.part(piece.start, piece.end) for piece in pieces]
        totals = {name: _combined(losses, weights[name], parts) for name in self._possible}
        for piece in sorted(pieces, key=lambda piece: piece.start - piece.end):
            # ways that give the same need not be told apart
            if len({f"{totals[name]:.9g}" for name in self._possible}) < 2:
                break
            self._compare_halves(piece, predict, batch, weights)
        like: Tensor = pieces[0].loss
        return torch.tensor(totals[self._possible[0]], dtype=like.dtype, device=like.device)

    @_random_state_kept()
    def _compare_few(self, predict: Predict, batch: Batch, weights: Weights) -> None:
        """Compare what a few samples give in one piece and in two, before anything is trusted."""

        def runs_of(n: int) -> tuple[list[int], list[Any], list[Any]]:
            # unequal: a mean of means of equal parts hides a wrong weight
            few, middle = batch.few(n), min(-(-n * 5 // 8), n - 1)
            parts = [few.part(0, middle), few.part(middle, n)]
            # the whole again, which tells whether it is random
            runs = [few.part(0, n), *map(copy.copy, parts), few.part(0, n)]
            return [0, middle, n], parts, [predict(each) for each in runs]

        found = _first_that_fits(runs_of, [n for n in (8, 4, 2) if n <= batch.n_samples])
        if found is None:
            return
        ends, parts, ((whole, logits, _), *split, (again, others, _)) = found
        if whole is not None and self._agree(float(again), float(whole), logits):
            self._rule_out(float(whole), parts, [loss for loss, _, _ in split], weights, logits)
        columns = [tensors_in([each]) for each in (logits, others, *[one for _, one, _ in split])]
        if len({*map(len, columns)}) > 1:
            return
        for tensor, same, *halves in zip(*columns, strict=True):
            numbers = [tensor] if tensor.is_floating_point() else []
            rtol = _rtol_of(_OUTPUT_RTOL, numbers, self._types)
            if _are_rows(tensor, [(0, ends[-1], same)], rtol) and not _are_rows(
                tensor, [*zip(ends, ends[1:], halves, strict=False)], rtol
            ):
                raise _uncut(
                    f"{describe_tensor(tensor)} among the outputs of a few samples is different "
                    "when these run in parts: its rows depend on other samples",
                    "Compute what mixes samples after the evaluation, in compute_metrics=;",
                )

    @_random_state_kept()
    def _compare_halves(
        self, piece: _PredictedPiece, predict: Predict, batch: Batch, weights: Weights
    ) -> None:
        start, end = piece.start, piece.end
        # of single samples nothing tells what their losses are a mean over
        if end - start < 2:
            return
        middle = (start + end) // 2
        halves = [batch.part(start, middle), batch.part(middle, end)]
        losses = [predict(copy.copy(half), loss_only=True)[0] for half in halves]
        self._rule_out(float(piece.loss), halves, losses, weights, piece.logits)

    def _rule_out(
        self, whole: float, parts: Any, losses: Sequence[Any], weights: Weights, logits: Any
    ) -> None:
        """Compare the loss of a few samples with that of their parts, by every weight."""
        assert self._possible is not None
        if not math.isfinite(whole):
            return
        found = {name: _combined(losses, weights[name], parts) for name in self._possible}
        off = {name: abs(total - whole) for name, total in found.items() if math.isfinite(total)}
        if not any(self._agree(found[name], whole, logits, losses[0]) for name in off):
            raise _mismatch(whole, [found[name] for name in off])
        if DECLARED in off and self._agree(found[DECLARED], whole, logits, losses[0]):
            self._possible = [DECLARED]
            return
        # rounding is no reason to prefer one of them
        bound = max(_CLEARLY * min(off.values()), _ROUNDING * abs(whole))
        self._possible = [name for name in self._possible if off.get(name, math.inf) <= bound]

    def _agree(self, found: float, whole: float, logits: Any, *losses: Tensor) -> bool:
        rtol = _rtol_of(_LOSS_RTOL, losses, self._types)
        floats = [each for each in tensors_in([logits]) if each.is_floating_point()]
        sizes = [each.abs().nan_to_num(0, 0).max().item() for each in floats if each.numel()]
        return abs(found - whole) <= rtol * (abs(whole) + _OF_LOGITS * max(sizes, default=1e-2))


def _first_that_fits(work: Callable[[int], Any], sizes: Sequence[int]) -> Any:
    for size in sizes:
        try:
            return work(size)
        except Exception as error:
            # a model may not run on so few
            if not adaptive.is_oom(error):
                return None
    return None


def _rtol_of(rtols: Sequence[float], results: Sequence[Tensor], types: set[torch.dtype]) -> float:
    known = {torch.float64: 0, torch.float32: 1}
    dtypes = types | {each.dtype for each in results}
    return rtols[max((known.get(dtype, 2) for dtype in dtypes), default=2)]


def _are_rows(whole: Tensor, parts: Sequence[tuple[int, int, Tensor]], rtol: float) -> bool:
    """Return whether parts of a batch have the rows of the whole."""
    is_exact, errors = not whole.is_floating_point(), []
    if is_exact and rtol > _OUTPUT_RTOL[1]:
        return True
    scale = 0.0 if is_exact or not whole.numel() else whole.abs().nan_to_num(0, 0, 0).max().item()
    for start, end, part in parts:
        # joining refuses others, or they are the same for each sample
        if not part.dim() or (len(part), len(whole)) != (end - start, parts[-1][1]):
            return True
        rows = whole[start:end]
        if rows.dim() > 1 and rows.shape != part.shape:
            # sequences end earlier, with padding behind them
            rest = rows[:, part.shape[1] :]
            rows = rows[:, : part.shape[1]]
            if rows.shape != part.shape or bool((rest != rest.flatten()[:1]).any()):
                return False
        near = torch.isclose(part, rows, rtol=0, atol=rtol * scale, equal_nan=True)
        errors.append(~near.flatten())
    wrong = torch.cat(errors).float()
    return not wrong.numel() or wrong.mean().item() <= (_OTHER_LABELS if is_exact else 0)


def _combined(losses: Sequence[Any], weight: Weight | None, parts: Sequence[Any]) -> float:
    """Return the loss of a batch from its parts: a weighted mean, or a sum without weights."""
    if weight is None:
        return sum(map(float, losses))
    weights = [float(weight(part)) for part in parts]
    # the mean of nothing is nan, which a weight of zero does not undo
    sums = [float(loss) * each for loss, each in zip(losses, weights, strict=True) if each]
    return sum(sums) / sum(weights) if sums else math.nan


def _mismatch(whole: float, found: Sequence[float]) -> SplitMismatchError:
    advice = (
        'Say what the mean divides by: adaptive_options = {"weight": lambda b: ...}; or evaluate '
        "with a per_device_eval_batch_size that fits, or without labels, so that there is no loss."
    )
    closest = min(found, key=lambda each: abs(each - whole), default=math.nan)
    return SplitMismatchError(
        f"The loss of some samples of an evaluation is {whole:.6g}, and that of their parts comes "
        f"to {closest:.6g} at the nearest: it is no mean over samples or valid labels, and no "
        f"sum, so that pieces of a batch don't tell the loss of the batch. {advice}",
        whole,
        closest,
        advice,
    )


# --- outputs


def _joined(column: Sequence[Any], lengths: Sequence[int]) -> Any:
    """Return the outputs of a batch, of those of its pieces.

    Raises:
        SplitMismatchError: there is something in them that has not one row for each sample.
    """
    first = column[0]
    if all(isinstance(each, Tensor) for each in column):
        # sequences of other lengths, as generated ones are, are padded as between batches
        joined = joined_rows(column, lengths, _PADDING)
        if joined is not None:
            return joined
    elif levels := levels_of(column):
        children = zip(*(level.children for level in levels), strict=True)
        return levels[0].make([_joined(each, lengths) for each in children])
    elif all(type(each) is type(first) and each == first for each in column):
        return first
    what = describe_tensor(first) if isinstance(first, Tensor) else f"a {type(first).__name__}"
    raise _uncut(
        f"{what} among its outputs has not one row for each sample, so that it can't be put "
        "together",
        "Leave it out with ignore_keys= or preprocess_logits_for_metrics=,",
    )


def _uncut(why: str, instead: str) -> SplitMismatchError:
    advice = f"{instead} or evaluate with a per_device_eval_batch_size that fits."
    return SplitMismatchError(
        f"A batch of an evaluation had to be cut into pieces, and {why}. {advice}", advice=advice
    )
