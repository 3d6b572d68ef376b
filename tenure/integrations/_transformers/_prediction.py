"""A prediction step in pieces: outputs are put together, and the loss is that of the whole batch.

Invariant: what comes back is what the whole batch gives, or an error; outputs of pieces wait on the
host, so that they do not stand beside what the next piece needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tenure import adaptive
from tenure._containers import mapped
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
# By so much bfloat16 may be off, for kernels of other sizes round in another way. A loss that is no
# mean of its parts, such as one of pairs of samples, is off by more.
_TOLERANCE = 1e-2
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
        # of an object, so that another trainer learns its own sizes
        self._run = adaptive.range(collect="list", restore_rng=True, context=self)(work)
        self.forget()

    def __call__(
        self, predict: Predict, batch: Batch, weights: Callable[[], Weights]
    ) -> tuple[Any, Any, Any]:
        """Run one.

        Args:
            predict: does it for a part.
            batch: the batch.
            weights: tells what its loss may be a mean over; asked where there are pieces.

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
        loss = None
        if first.loss is not None:
            loss = self._loss(pieces, predict, batch, weights())
        lengths = [piece.end - piece.start for piece in pieces]
        logits = _joined([piece.logits for piece in pieces], lengths)
        return loss, logits, _joined([piece.labels for piece in pieces], lengths)

    def forget(self) -> None:
        """Forget how the loss adds up, because another evaluation may have different data."""
        self._possible: list[str] | None = None

    def _loss(
        self,
        pieces: Sequence[_PredictedPiece],
        predict: Predict,
        batch: Batch,
        weights: Weights,
    ) -> Tensor:
        is_first, losses = self._possible is None, [piece.loss for piece in pieces]
        # of what was ruled out before nothing is asked; names may be others where labels are
        known = [name for name in self._possible or () if name in weights]
        self._possible = known or list(weights)
        parts = [batch.part(piece.start, piece.end) for piece in pieces]
        totals = {name: _combined(losses, weights[name], parts) for name in self._possible}
        for piece in sorted(pieces, key=lambda piece: piece.start - piece.end):
            # ways that give the same need not be told apart; but one of them has to be right
            if not is_first and len({f"{totals[name]:.9g}" for name in self._possible}) < 2:
                break
            self._rule_out(piece, predict, batch, weights)
            is_first = False
        like: Tensor = pieces[0].loss
        return torch.tensor(totals[self._possible[0]], dtype=like.dtype, device=like.device)

    def _rule_out(
        self, piece: _PredictedPiece, predict: Predict, batch: Batch, weights: Weights
    ) -> None:
        """Compare the loss of a piece with that of its halves, by every weight."""
        assert self._possible is not None
        start, end, whole = piece.start, piece.end, float(piece.loss)
        # of single samples nothing tells what their losses are a mean over
        if end - start < 2 or not math.isfinite(whole):
            return
        middle = (start + end) // 2
        halves = [batch.part(start, middle), batch.part(middle, end)]
        losses = [predict(half, loss_only=True)[0] for half in halves]
        found = {name: _combined(losses, weights[name], halves) for name in self._possible}
        off = {name: abs(total - whole) for name, total in found.items() if math.isfinite(total)}
        least = min(off.values(), default=math.inf)
        if least > _TOLERANCE * abs(whole):
            raise _mismatch(whole, [total for total in found.values() if math.isfinite(total)])
        # rounding is no reason to prefer one of them
        bound = max(_CLEARLY * least, _ROUNDING * abs(whole))
        self._possible = [name for name in self._possible if off.get(name, math.inf) <= bound]


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
        "Evaluate with a per_device_eval_batch_size that fits; or without labels, so that there "
        "is no loss."
    )
    closest = min(found, key=lambda each: abs(each - whole), default=math.nan)
    return SplitMismatchError(
        f"The loss of some samples of an evaluation is {whole:.6g}, and that of their halves comes "
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
        if joined is None:
            raise _not_by_samples(describe_tensor(first))
        return joined
    if levels := levels_of(column):
        children = zip(*(level.children for level in levels), strict=True)
        return levels[0].make([_joined(each, lengths) for each in children])
    if all(type(each) is type(first) and each == first for each in column):
        return first
    raise _not_by_samples(f"a {type(first).__name__}")


def _not_by_samples(what: str) -> SplitMismatchError:
    advice = (
        "Leave it out with ignore_keys= or preprocess_logits_for_metrics=, or evaluate with a "
        "per_device_eval_batch_size that fits."
    )
    return SplitMismatchError(
        f"A batch of an evaluation had to be cut into pieces, and {what} among its outputs has not "
        f"one row for each sample, so that it can't be put together. {advice}",
        advice=advice,
    )
