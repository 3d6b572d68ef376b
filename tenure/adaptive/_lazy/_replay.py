"""Running what was recorded: the plain program, later.

Invariant: a replay calls the same functions in the same order, in the modes they were called in, so
that what they share, write and draw comes out as in the program that was recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor

from ._meta import BatchInt, at
from ._tape import PlainValue, RecordedCall, Ref


def filled(value: Any, get: Callable[[int], Any], n_samples: int | None) -> Any:
    """Return the arguments with recorded values in their places.

    Args:
        value: the arguments as they were stored.
        get: gives a value by its number.
        n_samples: how many samples there are; None: as many as when it was recorded.
    """
    kind = type(value)
    if kind is Ref:
        return get(value.number)
    if kind is BatchInt:
        return int(value) if n_samples is None else at(value, n_samples)
    if kind is tuple:
        return tuple([filled(each, get, n_samples) for each in value])
    if kind is list:
        return [filled(each, get, n_samples) for each in value]
    if kind is dict:
        return {key: filled(each, get, n_samples) for key, each in value.items()}
    if kind is slice:
        parts = (value.start, value.stop, value.step)
        return slice(*[filled(each, get, n_samples) for each in parts])
    return value


def flat_tensors(value: Any) -> list[Tensor]:
    """Return the tensors in what a function of torch returned, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for each in value for tensor in flat_tensors(each)]
    if isinstance(value, dict):
        return [tensor for each in value.values() for tensor in flat_tensors(each)]
    return []


class ReplayPlan(NamedTuple):
    """Calls to be run, and what may be let go after each.

    Attributes:
        entries: the calls, in order.
        last: the numbers that are used by a call for the last time, by its place.
    """

    entries: list[RecordedCall]
    last: list[list[int]]


def replayed(entries: Iterable[RecordedCall], kept: Iterable[int]) -> ReplayPlan:
    """Find out when each value is used for the last time.

    Args:
        entries: the calls, in order.
        kept: the numbers of values that stay.
    """
    entries = list(entries)
    last: dict[int, int] = {}
    for i, entry in enumerate(entries):
        for number in entry.reads:
            last[number] = i
        for number in entry.made:
            last.setdefault(number, i)
    for number in kept:
        last.pop(number, None)
    gone: list[list[int]] = [[] for _ in entries]
    for number, i in last.items():
        gone[i].append(number)
    return ReplayPlan(entries, gone)


def run(
    what: ReplayPlan,
    env: dict[int, Any],
    kind: str,
    n_samples: int | None = None,
    *,
    others: Mapping[int, PlainValue] | None = None,
    graphs: bool = True,
) -> None:
    """Run calls on real tensors.

    Args:
        what: the calls.
        env: values by number; gets those that are computed.
        kind: the kind of device.
        n_samples: how many samples there are; None: as many as when it was recorded.
        others: values that are in no ``env``.
        graphs: whether calls that were recorded with gradients make graphs.
    """

    def get(number: int) -> Any:
        found = env.get(number)
        return others[number].given() if found is None and others else found

    at_place = iter(what.last)
    for modes, group in groupby(what.entries, key=attrgetter("modes")):
        with modes._replace(grad=modes.grad and graphs).entered(kind):
            for entry in group:
                freezes = entry.verdict is not None and entry.verdict.freezes
                n = None if freezes else n_samples
                out = entry.func(*filled(entry.args, get, n), **filled(entry.kwargs, get, n))
                if entry.outs:
                    _take(env, entry, out)
                out = None
                for number in next(at_place):
                    env.pop(number, None)


def _take(env: dict[int, Any], entry: RecordedCall, out: Any) -> None:
    made = zip(entry.outs, flat_tensors(out), strict=True)
    env.update({number: tensor for number, tensor in made if number is not None})


def written_by(entries: Iterable[RecordedCall]) -> list[Tensor]:
    """Return plain tensors that calls write into, such as running statistics."""
    found = [
        tensor
        for entry in entries
        if entry.shape.writes_plain
        for tensor in entry.tensors
        if not tensor.requires_grad
    ]
    return list({id(tensor): tensor for tensor in found}.values())
