"""One recorded call, the modes it was made in, and what it begins with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tenure._devices import NO_ACCELERATOR
from tenure._storages import storage_key
from tenure._torch.writes import version_of

from .._label import Label

_numbers = count()


class Ref:
    """A recorded value among arguments."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


def new_number() -> int:
    """The number of another value, larger than all before."""
    return next(_numbers)


class Modes(NamedTuple):
    """The modes of torch that change what a function does.

    Attributes:
        grad: whether gradients are recorded.
        inference: whether inference mode is on.
        autocast: the type of each kind of device that has autocast on.
        caches: whether autocast keeps the weights that it casts.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    caches: bool

    @staticmethod
    def now(kind: str) -> Modes:
        """Those of this moment, for the host and one more kind of device."""
        kinds = ("cpu",) if kind in NO_ACCELERATOR else ("cpu", kind)
        return Modes(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple((k, torch.get_autocast_dtype(k)) for k in kinds if torch.is_autocast_enabled(k)),
            torch.is_autocast_cache_enabled(),
        )

    @contextmanager
    def entered(self, kind: str) -> Iterator[None]:
        """A block in which they hold."""
        now = Modes.now(kind)
        with ExitStack() as block:
            if now.inference != self.inference:
                block.enter_context(torch.inference_mode(self.inference))
            if torch.is_grad_enabled() != self.grad:
                block.enter_context(torch.set_grad_enabled(self.grad))
            if (now.autocast, now.caches) != (self.autocast, self.caches):
                ours = dict(self.autocast)
                for each in sorted(ours.keys() | dict(now.autocast).keys()):
                    dtype = ours.get(each) or torch.get_autocast_dtype(each)
                    block.enter_context(
                        torch.autocast(each, dtype, each in ours, cache_enabled=self.caches)
                    )
            yield


Mark = tuple[int | None, int | None]


def mark_of(tensor: Tensor) -> Mark:
    """How often a tensor was written, and the memory that it has."""
    # what is written through ``.data`` counts nowhere; what is assigned to it is other memory
    return version_of(tensor), storage_key(tensor)


class Verdict(NamedTuple):
    """What a call is in a split.

    Attributes:
        kind: ``"chunk"``: runs on each part of the batch; ``"term"``: a reduction over it;
            ``"tail"``: wants all of it; ``"before"``: makes something of the batch alone, and runs
            first, on all of it.
        why: what makes it want all of it.
        labels: where the tensors that it makes have the samples.
        freezes: whether sizes are taken as the numbers that they were.
        reduces: how a term reduces: ``"sum"``, ``"mean"`` or ``"counted"``.
    """

    kind: str
    why: str
    labels: tuple[Label, ...]
    freezes: bool = False
    reduces: str = ""


@dataclass(slots=True, eq=False)
class Entry:
    """One recorded call.

    Attributes:
        seq: where it stands among all.
        func: the function.
        args: its arguments, with `Ref` for recorded values.
        kwargs: the same by name.
        modes: the modes it was called in.
        outs: the numbers of the tensors it gives; None for one that it was given.
        reads: the numbers that it takes.
        shape: what is known of such calls.
        plains: the tensors that it takes and that were not recorded, with what each was: see
            `mark_of`.
        site: where the user's program called it, where that may have to be told.
        is_done: whether it has run on the whole batch.
        verdict: what it is in a split, once that was tried.
    """

    seq: int
    func: Callable[..., Any]
    args: Any
    kwargs: Any
    modes: Modes
    outs: tuple[int | None, ...]
    reads: tuple[int, ...]
    shape: Any
    plains: tuple[tuple[Tensor, Mark], ...] = ()
    site: Any = None
    is_done: bool = False
    verdict: Any = None

    @property
    def made(self) -> list[int]:
        """The numbers of the tensors that it makes."""
        return [number for number in self.outs if number is not None]

    def written(self, views: Mapping[int, int]) -> set[int]:
        """Return what it writes into, as the first values that have that memory."""
        if not self.shape.changed:
            return set()
        given: list[int] = list(dict.fromkeys(self.reads))
        return {views.get(given[i], given[i]) for i in self.shape.changed if i < len(given)}

    def touched(self, views: Mapping[int, int]) -> set[int]:
        """Return what it reads, makes or writes, as the first values that have that memory."""
        return {views.get(n, n) for n in (*self.reads, *self.made)}


def makers_of(
    entries: Iterable[Entry],
    numbers: Iterable[int],
    views: Mapping[int, int],
    *,
    statistics: bool = False,
) -> list[Entry]:
    """Return those calls that make some values, or write into their memory, in order.

    Args:
        entries: the calls.
        numbers: the values.
        views: for values that share the memory of an earlier one the first of those.
        statistics: whether also those that write into what was not recorded.
    """
    wanted = {views.get(n, n) for n in numbers}
    found = []
    for entry in reversed(list(entries)):
        gives = {views.get(n, n) for n in entry.made} | entry.written(views)
        if gives & wanted or (statistics and entry.shape.writes_plain):
            found.append(entry)
            wanted |= {views.get(n, n) for n in entry.reads}
    return found[::-1]


class Leaf(NamedTuple):
    """A value that nothing recorded gives.

    Attributes:
        value: the tensor.
        label: where it has the samples.
        mark: what it was: see `mark_of`.
    """

    value: Tensor
    label: Label
    mark: Mark


def leaf_of(value: Tensor, label: Label) -> Leaf:
    """A leaf as it is now."""
    return Leaf(value, label, mark_of(value))
