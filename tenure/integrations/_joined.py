"""How what micro-batches gave makes what the whole batch would have given.

Rows are concatenated, means are averaged with their weights, and what is the same in each stays.
Invariant: what can't be joined is refused by its place; nothing is guessed from one part alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tenure._callers import warn_user
from tenure._containers import Level, level_of, mapped
from tenure._errors import AdaptiveUsageError, AdaptiveUsageWarning
from tenure._text import describe_tensor

_ADVICE = "Give tensors or lists with one row a sample in its place."


class StepEvent(NamedTuple):
    """One thing that a micro-batch, or a whole batch, did beside its loss.

    Attributes:
        kind: "log" for what `self.log` got, or another.
        name: of what was logged, returned or called.
        value: without graphs.
        how: of a log, its options.
    """

    kind: str
    name: Any
    value: Any
    how: Any = None


@dataclass(slots=True)
class BatchPart:
    """What one micro-batch did.

    Attributes:
        events: in order.
        loss: what was returned as the loss, without its graph; None if that is no tensor.
        weight: what that is a mean over; None: its samples.
        is_skipped: whether nothing was returned, so that the batch is to be skipped.
    """

    events: list[StepEvent] = field(default_factory=list)
    loss: Tensor | None = None
    weight: Any = None
    is_skipped: bool = False


def side_by_side(parts: Sequence[BatchPart], kind: str) -> list[tuple[StepEvent, ...]] | None:
    """Return for each event of a kind those of all parts; None if they did different things."""
    columns = [[event for event in part.events if event.kind == kind] for part in parts]
    if len({tuple(event.name for event in events) for events in columns}) > 1:
        return None
    return list(zip(*columns, strict=True))


class Joiner:
    """Joins values of micro-batches.

    Args:
        parts: the micro-batches.
        sizes: the samples of each.
        loss: the loss of the whole batch; None where it is no mean or sum of theirs.
        rules: how numbers add up of which nobody has said it.

    Attributes:
        sizes: the samples of each.
    """

    def __init__(
        self,
        parts: Sequence[BatchPart],
        sizes: Sequence[int],
        loss: Tensor | None,
        rules: NumberRules,
    ) -> None:
        self.sizes = sizes
        self._losses: list[Tensor | None] = [part.loss for part in parts]
        self._loss = loss
        self._weights = None if parts[0].weight is None else [part.weight for part in parts]
        self.rules = rules

    def event(self, events: Sequence[StepEvent], place: str, advice: str) -> StepEvent:
        """Return what the whole batch does of what each part did.

        Args:
            events: of the parts, alike.
            place: what errors and warnings call their values.
            advice: what the user may do where it is not known how logs add up.
        """
        kind, name, _, how = events[0]
        values = [event.value for event in events]
        if kind != "log":
            return StepEvent(kind, name, self.joined(values, place), how)
        weights = _batch_sizes(self, [event.how.get("batch_size") for event in events])
        how = how if weights is None else {**how, "batch_size": sum(weights)}
        # the number of samples says how the batch counts in an epoch, and not what the value
        # divides by
        weights = None if weights == list(self.sizes) else weights
        return StepEvent(
            kind, name, self.log(values, place, advice, how.get("reduce_fx"), weights), how
        )

    def joined(self, values: Sequence[Any], place: str) -> Any:
        """Return one value for the whole batch from those of its micro-batches.

        Args:
            values: tensors, numbers, or containers of one shape.
            place: what errors call them.

        Raises:
            AdaptiveUsageError: they can't be joined.
        """
        first = values[0]
        if len(values) == 1:
            return first
        if self.are_losses(values):
            return self.loss_like(first)
        # as in `metric.update(loss, weight=len(x))`
        if self.count_samples(values, place):
            return sum(values)
        if all(map(_is_number, values)):
            return self.rules.joined(self, f"{place} is a number", values, advice=_ADVICE)
        if all(isinstance(value, Tensor) for value in values):
            joined = joined_rows(values, () if place in self.rules.shared else self.sizes)
            if joined is None:
                raise self._refusal(first, place)
            return joined
        if isinstance(first, Number | str | bytes | None) and all(v == first for v in values):
            return first
        if isinstance(first, list) and self._have_rows(values, place):
            return [item for value in values for item in value]
        levels = levels_of(values)
        if not levels:
            raise self._refusal(first, place)
        children = zip(*(level.children for level in levels), strict=True)
        return levels[0].make(
            [
                self.joined(each, f"{place}[{key!r}]")
                for key, each in zip(levels[0].keys, children, strict=True)
            ]
        )

    def learn_event(self, whole: StepEvent, events: Sequence[StepEvent], place: str) -> None:
        """Find out how numbers of an event add up, by what the parts of a few samples did."""
        values = [event.value for event in events]
        if whole.kind == "log":
            self.rules.learn(self, place, values, whole.value)
        else:
            self.learn(values, whole.value, place)

    def learn(self, values: Sequence[Any], whole: Any, place: str) -> None:
        """Find out how numbers in a container add up, as `joined` finds them.

        Args:
            values: what the parts of a few samples gave.
            whole: what these samples gave in one piece.
            place: what errors call them.
        """
        self.rules.learn_rows(place, values, whole)
        if all(map(_is_number, (whole, *values))):
            self.rules.learn(self, f"{place} is a number", values, whole)
            return
        levels = levels_of((whole, *values))
        if not levels:
            return
        children = zip(*(level.children for level in levels), strict=True)
        for key, (child, *others) in zip(levels[0].keys, children, strict=True):
            self.learn(others, child, f"{place}[{key!r}]")

    def are_losses(self, values: Sequence[Any]) -> bool:
        """Return whether each value is the loss of its micro-batch."""
        return self._loss is not None and all(map(_is_loss, values, self._losses))

    def loss_like(self, value: Any) -> Any:
        """Return the loss of the whole batch, as a number if the value is one."""
        assert self._loss is not None
        return self._loss if isinstance(value, Tensor) else self._loss.item()

    def count_samples(self, values: Sequence[Any], place: str) -> bool:
        """Return whether each value is how many samples its micro-batch has."""
        return type(values[0]) is int and self._have_rows(values, place)

    def mean(self, values: Sequence[Any], weights: Sequence[float] | None = None) -> Any:
        """Return the mean of means.

        Args:
            values: numbers, or tensors of one element.
            weights: what each is a mean over; None: what the loss is.
        """
        if isinstance(values[0], Number) and all(value == values[0] for value in values):
            return values[0]
        if weights is None:
            weights = self.sizes if self._weights is None else [*map(float, self._weights)]
        # a mean over nothing is what the parts say of it, nan
        weights = weights if any(weights) else self.sizes
        total = sum(weights)
        # a part of weight zero is left out: its mean is nan
        return self.total(
            [_wide(v) * (w / total) for v, w in zip(values, weights, strict=True) if w]
        )

    @staticmethod
    def total(values: Sequence[Any]) -> Any:
        """Return the sum, of the type of the first."""
        return sum(values[1:], values[0])

    def log(
        self,
        values: Sequence[Any],
        place: str,
        advice: str,
        reduction: Any = None,
        weights: Sequence[float] | None = None,
    ) -> Any:
        """Return what the whole batch logs.

        Args:
            values: what its parts logged.
            place: what warnings call them.
            advice: what the user may do where it is not known how they add up.
            reduction: how they do, in the user's words.
            weights: what each is a mean over, as the user says.
        """
        kind = str(getattr(reduction, "__name__", reduction)).lower()
        first: Any = values[0]
        if len(values) == 1 or not isinstance(first, Tensor | Number):
            return first
        if self.are_losses(values):
            return self.loss_like(first)
        if kind in ("min", "max"):
            return _extreme(values, kind)
        if kind == "sum" or self.count_samples(values, place):
            return self.total(values)
        # who says what it is has not to be asked
        if reduction is not None or weights is not None:
            return self.mean(values, weights)
        return self.rules.joined(self, place, values, advice=advice)

    def _have_rows(self, values: Sequence[Any], place: str) -> bool:
        return [*map(_n_rows, values)] == [*self.sizes] and place not in self.rules.shared

    def _refusal(self, first: Any, place: str) -> AdaptiveUsageError:
        shown = describe_tensor(first) if isinstance(first, Tensor) else f"a {type(first).__name__}"
        return AdaptiveUsageError(
            f"{place} is {shown} for the first of {len(self.sizes)} micro-batches, and there is no "
            "one way to make that of the whole batch of them. Give tensors or lists with one row a "
            "sample, means of floating point, or what is the same for every micro-batch."
        )


def joined_rows(
    tensors: Sequence[Tensor], sizes: Sequence[int], padding: int | None = None
) -> Tensor | None:
    """Return the rows of all tensors, or what is the same in each; None if it is neither.

    Args:
        tensors: of any shape.
        sizes: the rows of each.
        padding: fills sequences up to the longest; None: all have one length.
    """
    first = tensors[0]
    if [tuple(each.shape[:1]) for each in tensors] != [(size,) for size in sizes]:
        # such as a matrix of the model's own
        return first if all(torch.equal(first, each) for each in tensors[1:]) else None
    if len({each.shape[1:] for each in tensors}) == 1:
        return torch.cat(list(tensors))
    if padding is None or len({(each.dim(), each.shape[2:]) for each in tensors}) != 1:
        return None
    length = max(each.shape[1] for each in tensors)
    joined = first.new_full((sum(sizes), length, *first.shape[2:]), padding)
    for each, rows in zip(tensors, joined.split(list(sizes)), strict=True):
        rows[:, : each.shape[1]] = each
    return joined


def levels_of(values: Sequence[Any]) -> list[Level]:
    """Return one level of containers that have the same keys; none if they differ."""
    levels = [level for value in values if (level := level_of(value)) is not None]
    is_alike = len(levels) == len(values) and all(lv.keys == levels[0].keys for lv in levels)
    return levels if is_alike else []


def _is_loss(value: Any, loss: Tensor | None) -> bool:
    """Return whether a value is the loss itself, detached or as a number."""
    if loss is None:
        return False
    if isinstance(value, Tensor):
        # by its memory: reading the number would make the host wait for the device
        return value.numel() == 1 and value.data_ptr() == loss.data_ptr()
    # who has a float has waited already
    return isinstance(value, float) and value == loss.item()


def _is_number(value: Any) -> bool:
    """Return whether a value may be the mean or the sum of those of parts; a truth is neither."""
    if isinstance(value, Tensor):
        return not (value.dim() or value.dtype.is_complex or value.dtype == torch.bool)
    return type(value) in (int, float)


def _n_rows(value: Any) -> int | None:
    """Return how many samples a value has or counts, if it is of samples; else None."""
    if isinstance(value, Tensor):
        return value.shape[0] if value.dim() else None
    if isinstance(value, list):
        return len(value)
    return value if type(value) is int else None


def _wide(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype not in (torch.float32, torch.float64):
        return value.float()
    return value


def detached(value: Any) -> Any:
    """Return a container without the graphs of its tensors."""
    return mapped(Tensor.detach, value)


class NumberRules:
    """How numbers of parts add up, where nobody has said so: found out with a few samples.

    Attributes:
        shared: the places of what has as many rows, or is the same number, for any samples.
    """

    def __init__(self) -> None:
        self.shared: set[str] = set()
        # the rules by which parts have made the whole each time
        self._fitting: dict[str, set[str]] = {}
        self._told: set[str] = set()

    def learn_rows(self, place: str, values: Sequence[Any], whole: Any) -> None:
        """Find out whether values have as many rows whatever the samples are."""
        if len({*map(_n_rows, (*values, whole))}) == 1:
            self.shared.add(place)

    def learn(self, joiner: Joiner, what: str, values: Sequence[Any], whole: Any) -> None:
        """Compare the number of a few samples with those of their parts.

        Args:
            joiner: joins these.
            what: they are, in words.
            values: those of the parts.
            whole: that of the samples in one piece.
        """
        if not all(isinstance(each, Tensor | Number) for each in (whole, *values)):
            return
        self.learn_rows(what, values, whole)
        if joiner.are_losses(values) or joiner.count_samples(values, what):
            return
        numbers, wanted = [float(each) for each in values], float(whole)
        # neither the mean over nothing nor zeros tell one rule from another
        if not math.isfinite(wanted) or not any([wanted, *numbers]):
            return
        bound = _rtol_of(whole) * max(map(abs, [wanted, *numbers]))
        found = _by_rule(joiner, numbers)
        fits = {rule for rule, value in found.items() if abs(float(value) - wanted) <= bound}
        self._fitting[what] = self._fitting.get(what, fits) & fits

    def joined(self, joiner: Joiner, what: str, values: Sequence[Any], *, advice: str) -> Any:
        """Return one number for the whole batch; warn if it is not known which."""
        found = _by_rule(joiner, values)
        fitting = self._fitting.get(what)
        likely = [rule for rule in found if rule in (fitting or found)]
        if {*likely} == {"max", "min"}:
            # such as a mean of which one part had nothing: the samples did not tell
            likely = ["mean", *likely]
        if len(likely) == 1:
            # known, so nothing is compared: reading a number waits for its device
            return found[likely[0]]
        differs = any(bool(value != values[0]) for value in values[1:])
        # where it is the mean over nothing in each, they are alike
        differs = differs and not all(map(math.isnan, values))
        # what all rules make alike can't be told wrong
        is_unclear = len({float(found[rule]) for rule in likely}) > 1 if fitting else differs
        if is_unclear and what not in self._told:
            self._told.add(what)
            rules = None if fitting is None else sorted(fitting)
            _warn(what, likely[0], rules, advice)
        # a mean of whole numbers is of another type
        return values[0] if likely[0] == "mean" and not differs else found[likely[0]]


def _by_rule(joiner: Joiner, values: Sequence[Any]) -> dict[str, Any]:
    """Return the joined values by each rule that may hold, the likeliest first."""
    found = {
        "mean": joiner.mean(values),
        "sum": joiner.total(values),
        "max": _extreme(values, "max"),
        "min": _extreme(values, "min"),
    }
    is_whole = all(
        isinstance(value, int) or (isinstance(value, Tensor) and not value.is_floating_point())
        for value in values
    )
    # such as right answers; those that are the same in each are no counts
    if is_whole and any(bool(value != values[0]) for value in values[1:]):
        return {"sum": found["sum"], **found}
    return found


def _warn(what: str, taken: str, fitting: Sequence[str] | None, advice: str) -> None:
    if fitting is None:
        why = "nothing could be compared with the whole"
    elif fitting:
        why = f"a few samples fit {' and '.join(fitting)} alike"
    else:
        why = "of a few samples the whole is no mean, sum, maximum or minimum of its parts"
    warn_user(
        f"{what} in a batch that runs in micro-batches, and {why}: the {taken} of theirs is told. "
        f"{advice}",
        AdaptiveUsageWarning,
    )


def _rtol_of(value: Any) -> float:
    if isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16):
        return 2e-2
    return 2e-2 if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))) else 1e-4


def _extreme(values: Sequence[Any], kind: str) -> Any:
    if not isinstance(values[0], Tensor):
        return min(values) if kind == "min" else max(values)
    # compared on their device
    stacked = torch.stack([value.reshape(()) for value in values])
    return stacked.amin() if kind == "min" else stacked.amax()


def _batch_sizes(joiner: Joiner, given: Sequence[Any]) -> list[int] | None:
    """Return the `batch_size=` of each part if the values are means over it; else None."""
    if not all(isinstance(each, int) for each in given) or len(given) == 1:
        return None
    sizes = joiner.sizes
    # a setting of the program, such as the batch size of its loader, and not len(batch)
    is_setting = len(set(given)) == 1 and (
        len(set(sizes)) > 1 or given[0] == sum(sizes) or given[0] % sizes[0]
    )
    return None if is_setting else list(given)
