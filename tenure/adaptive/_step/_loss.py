"""The terms of a loss, as a step's function returned them, and the loss of the whole batch.

Invariant: the loss of the whole batch is one formula, used both for its value and, by autograd, for
the weight that the gradient of each chunk gets. The shares of the chunks in a mean are finite, not
negative, and sum up to 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tenure._callers import warn_user
from tenure._errors import AdaptiveUsageError, AdaptiveUsageWarning
from tenure._oom import is_oom
from tenure._text import describe_tensor
from tenure._torch.autograd import is_mean_over_rows
from tenure._torch.fakes import are_made
from tenure._torch.quiet import without_functions

Reduction = Literal["mean", "sum"]
Count = Tensor | float
ONLY = "loss"
"""The name of a term that has none of its own."""

_WANTED = (
    "Return a scalar loss, a pair (sum, count), or a dict of either; or return outputs, and pass "
    "the loss of all of them as loss=."
)
_BESIDE = "What is no part of the loss comes back with has_aux=True: return loss, others."
_ADDING = ("Add", "Mul", "Div", "Sum", "Stack")
_SCALING = ("Mul", "Div")
_MOST_ADDENDS = 100


@dataclass(slots=True)
class Term:
    """A part of a loss over some samples.

    Attributes:
        value: of no dimension; a mean or a sum, or with a count the sum that it divides.
        count: what the sum over the whole batch is divided by the sum of; None for a plain value.
    """

    value: Tensor
    count: Count | None


class Terms(NamedTuple):
    """The terms that the function returned for some samples, in one form.

    Attributes:
        by_name: the terms.
        named: whether the function named them, and so gets them named in ``then``.
    """

    by_name: dict[str, Term]
    named: bool

    def with_counts(self) -> dict[str, bool]:
        """Return which of them have counts."""
        return {name: term.count is not None for name, term in self.by_name.items()}

    def counts(self) -> dict[str, Count]:
        """Return the counts of those that have one."""
        found: dict[str, Count] = {}
        for name, term in self.by_name.items():
            if term.count is not None:
                found[name] = term.count
        return found

    def detached(self) -> Terms:
        """Return copies without graphs."""
        terms: dict[str, Term] = {}
        for name, term in self.by_name.items():
            # copies: what losses of torch return still has the memory of all their elements
            terms[name] = Term(term.value.detach().clone(), term.count)
        return Terms(terms, self.named)


def terms_of(returned: object, reduction: Reduction) -> Terms:
    """Bring what the function returned into one form.

    Raises:
        AdaptiveUsageError: it is no loss.
    """
    if isinstance(getattr(returned, "loss", None), Tensor):
        # as models of transformers return it, with logits that nobody runs backward
        raise AdaptiveUsageError(
            f"The function of step() returned a {type(returned).__name__}. Return its .loss."
        )
    if isinstance(returned, Mapping):
        if not returned:
            raise AdaptiveUsageError(f"The function of step() returned no terms. {_WANTED}")
        terms = {
            str(name): _term(each, f"[{name!r}]", reduction) for name, each in returned.items()
        }
        # 1 and "1" are two keys and one name
        if len(terms) < len(returned):
            raise AdaptiveUsageError(
                f"The function of step() returned terms of the same name: "
                f"{', '.join(map(repr, returned))}. Call each by another str."
            )
        return Terms(terms, named=True)
    return Terms({ONLY: _term(returned, "", reduction)}, named=False)


def check_declared(terms: Terms, weight: object, then: object) -> None:
    """Make sure that terms are what they are declared to be.

    Raises:
        AdaptiveUsageError: a weight is given, and all terms bring their own; or a pair is no sum
            with its count, such as a loss beside an accuracy; or a term is a part of another.
    """
    has_counts = [term.count is not None for term in terms.by_name.values()]
    if len(has_counts) == 1 and not has_counts[0]:
        return
    # a weight of one term beside a count of another is right: each has what it divides by
    if weight is not None and all(has_counts):
        raise AdaptiveUsageError(
            "The function of step() returned sums with their counts, and weight= was given too. "
            "Leave weight= out, or return means."
        )
    nodes = {name: term.value.grad_fn for name, term in terms.by_name.items()}
    for name, term in terms.by_name.items():
        if term.count is not None and is_mean_over_rows(nodes[name]):
            at = f" as {name!r}" if terms.named else ""
            raise AdaptiveUsageError(
                f"The function of step() returned a pair{at}, which is (sum, count), and the first "
                f"of it is a mean. Return the mean alone. {_BESIDE}"
            )
    # what becomes of several is said by then=, and one sum may have two counts
    if then is not None or any(has_counts):
        return
    for name, node in nodes.items():
        below = _addends(node)
        for other, part in nodes.items():
            if part is not None and part in below and other != name:
                raise AdaptiveUsageError(
                    f"The function of step() returned the terms {other!r} and {name!r}, which "
                    f"step() adds up, and {name!r} is made of {other!r}: it would count twice. "
                    f"Return only one of them. {_BESIDE}"
                )
    without = [name for name, term in terms.by_name.items() if not term.value.requires_grad]
    if not torch.is_grad_enabled() or len(without) == len(nodes) or are_made():
        return
    for name in without:
        # 0 is a term that is off
        if terms.by_name[name].value:
            warn_user(
                f"The function of step() returned the term {name!r}, which has no graph, and "
                f"adds it to the loss. {_BESIDE}",
                AdaptiveUsageWarning,
            )
            return


def _addends(node: Any) -> set[Any]:
    """Return the nodes of what a number was added up of, and its own."""
    found, waiting = {node}, [node]
    while waiting and len(found) < _MOST_ADDENDS:
        each = waiting.pop()
        if each is not None and each.name().startswith(_ADDING):
            below = [child for child, _ in each.next_functions if child is not None]
            # times a number; a product of two is another loss
            if each.name().startswith(_SCALING) and len(below) > 1:
                continue
            waiting += [child for child in below if child not in found]
            found.update(below)
    return found


def finished_loss(
    totals: dict[str, Tensor], named: bool, then: Callable[..., Any] | None
) -> Tensor:
    """Return the loss of terms over the whole batch.

    Raises:
        AdaptiveUsageError: ``then`` returned no scalar.
    """
    if then is not None:
        return scalar(then(totals if named else totals[ONLY]), "then() of step()")
    # not from 0: that would be another node in the graph of a step that is not split
    first, *others = totals.values()
    return sum(others, first)


def combined(
    chunks: Sequence[dict[str, Term]], shares: Sequence[float], reduction: Reduction
) -> dict[str, Tensor]:
    """Return the terms of the whole batch, of those of its chunks, which are the same for each.

    See Note [Exactness of a split], rule 1.
    """
    return {
        name: _combined([chunk[name] for chunk in chunks], shares, reduction) for name in chunks[0]
    }


def check_same_terms(first: Mapping[str, bool], other: Mapping[str, Term]) -> None:
    """Make sure that two chunks have the same terms.

    Args:
        first: the terms of one by name, and whether they have counts.
        other: those of the other.

    Raises:
        AdaptiveUsageError: they don't.
    """
    # a term that is left out where it is zero would change what its mean divides by
    if set(first) != set(other):
        raise AdaptiveUsageError(
            f"The function of step() returned the terms {', '.join(map(repr, first))} for one "
            f"micro-batch and {', '.join(map(repr, other))} for another. Return the same ones for "
            "each, with a count of zero where there is nothing to count."
        )
    for name, term in other.items():
        if first[name] != (term.count is not None):
            raise AdaptiveUsageError(
                f"The function of step() returned a count with the term {name!r} for one "
                "micro-batch and none for another. Return a pair (sum, count) for each, or for "
                "none."
            )


def scalar(value: object, what: str) -> Tensor:
    """Return a tensor of one number, as one of no dimension.

    Raises:
        AdaptiveUsageError: it is something else.
    """
    wanted = _WANTED if what.startswith("The function") else "Return a scalar loss."
    if not isinstance(value, Tensor):
        lost = ", and a number has no graph: leave .item() out" if isinstance(value, float) else ""
        raise AdaptiveUsageError(f"{what} returned {_brief(value)}{lost}. {wanted}")
    if value.numel() != 1 or not value.is_floating_point():
        raise AdaptiveUsageError(f"{what} returned {describe_tensor(value)}. {wanted}")
    return value if value.dim() == 0 else value.reshape(())


def _term(value: object, place: str, reduction: Reduction) -> Term:
    what = "The function of step()" + (f", at {place}," if place else "")
    if not isinstance(value, tuple | list):
        return Term(scalar(value, what), None)
    if len(value) != 2:
        raise AdaptiveUsageError(f"{what} returned {_brief(value)}. {_WANTED}")
    # what a pair is for is a mean, and a sum of means has no meaning for the whole batch
    if reduction == "sum":
        raise AdaptiveUsageError(
            f'{what} returned a pair (sum, count), which makes a mean, and loss="sum" was asked '
            'for. Leave loss="mean", or return the sum alone.'
        )
    return Term(scalar(value[0], what), _count(value[1], what))


def _count(count: object, what: str) -> Count:
    # A copy, because a function may count the next chunk in the same tensor. It stays on its
    # device, because reading it would make the host wait in each micro-batch.
    if isinstance(count, Tensor) and count.numel() == 1 and not count.requires_grad:
        return count.detach().clone().reshape(())
    number = plain_number(count)
    if number is not None:
        return number
    shown = describe_tensor(count) if isinstance(count, Tensor) else _brief(count)
    needs = " that requires grad" if isinstance(count, Tensor) and count.requires_grad else ""
    raise AdaptiveUsageError(
        f"{what} returned a count of {shown}{needs}. Return a number that is no function of what "
        f"is trained, such as how many elements the sum has. {_BESIDE}"
    )


def _combined(column: list[Term], shares: Sequence[float], reduction: Reduction) -> Tensor:
    # the scope around owns the result, and need not see what is computed on the way
    with without_functions():
        values = [widened(term.value) for term in column]
        counts = [widened_count(term.count) for term in column if term.count is not None]
        if reduction == "mean" and not counts:
            # a chunk without a share is left out, and not multiplied by zero: its mean is nan
            values = [value * share for value, share in zip(values, shares, strict=True) if share]
        total: Tensor = sum(values[1:], values[0])
        total = total / sum(counts) if counts else total
    return total.clone()


def _brief(value: object) -> str:
    if value is None:
        return "None"
    shown = repr(value)
    kind = f"a {type(value).__name__}"
    return f"{kind}, {shown}" if len(shown) <= 40 else kind


# --- in which types sums and weights are computed, so that they lose nothing


def widened(value: Tensor) -> Tensor:
    """Return a scalar in the precision that sums of several are made in."""
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def widened_count(count: Tensor | float) -> Tensor | float:
    """Return a count in a type that sums of several fit into: in bfloat16, 256 and 1 are 256."""
    if not isinstance(count, Tensor) or count.is_complex():
        return count
    return widened(count) if count.is_floating_point() else count.long()


def widest_float(device: torch.device) -> torch.dtype:
    """Return the widest type of floating point that a device has."""
    # by far the most, and not worth an allocation
    if device.type in ("cpu", "cuda"):
        return torch.float64
    return torch.float64 if _has_float64(device) else torch.float32


@lru_cache(maxsize=64)
def _has_float64(device: torch.device) -> bool:
    """Return whether a device computes in it, as MPS and some XPUs don't; asked once of each."""
    try:
        torch.ones(1, dtype=torch.float64, device=device)
    except (RuntimeError, TypeError) as error:
        # no answer of the device's, and remembered it would be wrong for good
        if is_oom(error):
            raise
        return False
    return True


# --- the share of each chunk in a mean


def shares_of(lengths: Sequence[int], weights: Sequence[object] | None) -> list[float]:
    """Return the share of each chunk in a mean over the whole batch.

    Args:
        lengths: the number of samples of each chunk.
        weights: what ``weight`` returned for each chunk; None weighs by samples.

    Raises:
        AdaptiveUsageError: a weight is not a number, or less than zero, or not finite.
    """
    by_samples = _normalized([float(length) for length in lengths])
    # where all weights are zero the mean has no value, and samples stand in
    return by_samples if weights is None else _normalized(numbers_of(weights)) or by_samples


def plain_number(value: object) -> int | float | None:
    """Return a number of Python or NumPy as one of Python; None for anything else."""
    # NumPy's scalars are numbers to Python as well, but its 0-dimensional arrays are none
    if hasattr(value, "__array_interface__") and value.size == 1:  # type: ignore[attr-defined]
        value = value.item()  # type: ignore[attr-defined]
    # True as a weight is a mistake, such as a comparison that was to be summed up
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    return int(value) if isinstance(value, Integral) else float(value)


def copied(number: Any) -> Any:
    """Copy numbers: what returned them may compute the next ones in the same memory."""
    if isinstance(number, Tensor):
        return number.detach().clone()
    return number.copy() if hasattr(number, "__array_interface__") else number


def _normalized(weights: list[float]) -> list[float]:
    """Shares of 1; none if all weights are zero, for then the mean has no value."""
    # exact, so that the shares sum up to 1 as well as floats can
    total = math.fsum(weights)
    return [weight / total for weight in weights] if total else []


def numbers_of(weights: Sequence[object]) -> list[float]:
    """Return what ``weight`` returned as numbers.

    Raises:
        AdaptiveUsageError: one is not a number, or less than zero, or not finite.
    """
    numbers = []
    for weight in read_numbers(weights):
        number = plain_number(weight)
        if number is None or not 0 <= number < math.inf:
            raise AdaptiveUsageError(
                f"weight() returned {_shown(weight)} for a micro-batch. Return what the mean "
                "divides by: a number that is finite and not negative. Where each term divides by "
                "another, let the function return a dict of pairs (sum, count)."
            )
        numbers.append(float(number))
    return numbers


def read_numbers(values: Sequence[object]) -> list[object]:
    """Return the same with numbers for one-element tensors, read together by device."""
    read = list(values)
    # the host waits for a device once, not for each chunk
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, value in enumerate(values):
        if isinstance(value, Tensor) and value.numel() == 1:
            alike.setdefault((value.device, value.dtype), []).append(i)
    for (_, dtype), places in alike.items():
        tensors = [values[i].detach().reshape(()) for i in places]  # type: ignore[attr-defined]
        for i, number in zip(places, torch.stack(tensors).tolist(), strict=True):
            read[i] = int(number) if dtype is torch.bool else number
    return read


def _shown(value: object) -> str:
    return describe_tensor(value) if isinstance(value, Tensor) else repr(value)
