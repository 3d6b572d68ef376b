"""What a trainer logs while it computes a loss, kept until its step has worked.

Invariant: what failed attempts and verifications log is forgotten with them; of the attempt that
worked all is told once, as for the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .._joined import Joiner, NumberRules, learn_log, log_of

_ADVICE = "Log it in a callback, or where the whole batch has run, such as after training_step()."


@dataclass(slots=True)
class HeldLogs:
    """What one micro-batch logged.

    Attributes:
        rules: how logs of this trainer add up.
        calls: what `log` got, in order: numbers by name, and the other arguments.
        loss: of the micro-batch.
        weight: what that is a mean over; None: its samples.
    """

    rules: NumberRules
    calls: list[tuple[dict[str, Any], tuple[Any, ...], dict[str, Any]]] = field(
        default_factory=list
    )
    loss: Tensor | None = None
    weight: Any = None


def note_compared(whole: Any, split: Any) -> None:
    """Find out how logged values add up, from a few samples that ran whole and in parts."""
    (held,) = whole.aux
    if not held.calls or not _are_alike([held, *split.aux]):
        return
    joiner = Joiner(split.aux, split.sizes, split.loss, held.rules)
    for (logs, _, _), *parts in zip(held.calls, *(each.calls for each in split.aux), strict=True):
        for name, value in logs.items():
            learn_log(joiner, name, [part[0][name] for part in parts], value)


def joined_logs(
    parts: Sequence[HeldLogs], sizes: Sequence[int], loss: Tensor
) -> Iterator[tuple[dict[str, Any], tuple[Any, ...], dict[str, Any]]]:
    """Yield the values to log of a batch.

    Args:
        parts: what its micro-batches logged.
        sizes: the samples of each.
        loss: of the batch.
    """
    if not _are_alike(parts):
        # one that logs for some of its samples alone
        for part in parts:
            yield from part.calls
        return
    joiner = Joiner(parts, sizes, loss, parts[0].rules)
    for calls in zip(*(part.calls for part in parts), strict=True):
        first, args, kwargs = calls[0]
        options: list[dict[str, Any]] = [{} for _ in calls]
        logs = {
            name: log_of(joiner, name, [c[0][name] for c in calls], options, _ADVICE)[0]
            for name in first
        }
        yield logs, args, kwargs


def _are_alike(parts: Sequence[HeldLogs]) -> bool:
    return len({tuple(tuple(logs) for logs, _, _ in part.calls) for part in parts}) == 1
