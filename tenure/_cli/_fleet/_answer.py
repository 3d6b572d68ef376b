"""Predict what a model takes, compare it with each card, and find what makes it fit."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from tenure._errors import CommandError, TenureError
from tenure._show import Code, Paragraph, Part, Shown, plain, steps
from tenure._text import counted, format_bytes
from tenure._torch.fakes import unlogged
from tenure.adaptive import PeakReport, predict_peak
from tenure.paging import PagingPlan, plan_paging

from .._fitting import in_a_line, largest_micro_batch
from ._configured import Batch, Configured
from ._setup import PAGED, Setup, recipe
from ._work import Made, Size, in_memory, making, size_of

_MOST_SAMPLES = 2**20
_POWERS = [1 << i for i in range(1, 11)]
"""The numbers of ranks that are looked at, where more of them are to make it fit."""


class RankPeak(NamedTuple):
    """The peak of the rank that takes most: the first, because no shard is larger.

    Attributes:
        found: the prediction, or the plan of a paged model.
        size: that of the whole model.
        needed_bytes: what the device has to have.
    """

    found: PeakReport | PagingPlan
    size: Size
    needed_bytes: int

    def fits(self, n_bytes: int) -> bool:
        """Tell whether it fits in so many bytes."""
        if isinstance(self.found, PeakReport):
            return self.found.fits(n_bytes)
        return self.needed_bytes <= n_bytes

    def recipe(self, setup: Setup, maximum: int | None = None) -> str:
        """Return the lines that train as it was predicted, in micro-batches if need be."""
        budget_bytes = self.found.budget_bytes or 0 if setup.optimizer == PAGED else 0
        return recipe(setup, blocks=self.size.blocks, maximum=maximum, budget_bytes=budget_bytes)


class Remedy(NamedTuple):
    """A change with which it fits.

    Attributes:
        what: in words.
        how: lines to paste.
        needed_bytes: what is needed then.
    """

    what: str
    how: str
    needed_bytes: int


@dataclass(frozen=True, slots=True)
class Case:
    """One number of ranks, on one card.

    Attributes:
        ranks: how many ranks there are.
        memory_bytes: what the device has; None if nobody said.
        needed_bytes: what it has to have.
        fits: True or False; None if nothing is known to compare with.
        spare_bytes: what is left, or what is missing; it may fit with nothing left.
        host_bytes: what a rank keeps in host memory; None if nothing is offloaded.
        largest_batch: the most samples of a rank that fit; None if nobody asked.
        remedy: the first change with which the batch fits that was asked for; None if it fits, or
            if none was found.
    """

    ranks: int
    memory_bytes: int | None
    needed_bytes: int
    fits: bool | None
    spare_bytes: int | None
    host_bytes: int | None
    largest_batch: int | None
    remedy: Remedy | None

    def verdict(self) -> str:
        """Spell whether it fits."""
        needed = format_bytes(self.needed_bytes)
        on = f" on each of {self.ranks} ranks" if self.ranks > 1 else ""
        host = self.host_bytes
        beside = "" if host is None else f", and {format_bytes(host)} of host memory"
        if self.memory_bytes is None:
            return f"Needs {needed}{on}{beside}. Whether that fits, --device-memory says."
        spare_bytes = self.memory_bytes - self.needed_bytes
        difference = format_bytes(abs(spare_bytes))
        told = f"yes; it needs {needed}, {difference} to spare"
        if not self.fits:
            told = f"no; it needs {needed}, {difference} too much"
        elif spare_bytes < 0:
            told = f"yes, once the allocator gives back what it caches; else it keeps {needed}"
        largest = f"largest batch {self.largest_batch}" if self.largest_batch else "no batch fits"
        remedy = "" if self.remedy is None else f" It fits with {self.remedy.what}."
        return f"Fits in {format_bytes(self.memory_bytes)}{on}: {told}{beside}; {largest}.{remedy}"


class FleetAnswer(Shown):
    """The answer for all cases.

    Args:
        setup: the setup of the first case.
        model: its configuration.
        peak: what the first case takes.
        cases: each number of ranks on each card.
    """

    _is_spaced = True

    def __init__(
        self, setup: Setup, model: Configured, peak: RankPeak, cases: Sequence[Case]
    ) -> None:
        self._setup, self._model, self._peak, self._cases = setup, model, peak, cases
        known = [case.fits for case in cases if case.fits is not None]
        self.fits = all(known) if known else None

    def facts(self) -> dict[str, Any]:
        """Return the answer as values that JSON has."""
        return {
            "format": "tenure.fit",
            "version": 1,
            "fits": self.fits,
            "work": plain(self._setup),
            "model": type(self._model.config).__name__,
            **self._peak.size._asdict(),
            "cases": [
                plain(case) | {"remedy": case.remedy and case.remedy._asdict()}
                for case in self._cases
            ],
            "notes": self._model.notes,
            "report": plain(self._peak.found),
        }

    def _parts(self) -> list[Part]:
        setup, peak, notes = self._setup, self._peak, [*self._model.notes]
        n_parameters = f"{peak.size.n_parameters / 1e6:,.1f} million parameters"
        samples = f"{counted(setup.batch, 'sample')} of {self._model.sample_in_words()}"
        about = f"{self._model.config.model_type}, {n_parameters}; {samples}: {setup.words()}."
        verdicts = [case.verdict() for case in self._cases]
        parts: list[Part] = [Paragraph("", "\n".join([*verdicts, about]))]
        remedies = {case.remedy.how: case.remedy for case in self._cases if case.remedy is not None}
        for each in remedies.values():
            title = f"With {each.what} a step needs {format_bytes(each.needed_bytes)}:"
            parts.append(Code(title, each.how))
        if self._cases[0].fits and (setup.ranks > 1 or setup.optimizer == PAGED):
            parts.append(Code("These lines do so:", peak.recipe(setup)))
        if isinstance(peak.found, PeakReport):
            parts += peak.found._parts()
        else:
            # not one line for each unit
            lines = (line for line in str(peak.found).split("\n") if not line.startswith("    "))
            parts.append(Paragraph("", "\n".join(lines)))
        if setup.offloads:
            notes.append(
                "torch rounds each tensor in pinned memory up to a power of two, so with "
                "pin_memory=True the host needs up to twice as much for shards and gradients"
            )
        if notes:
            parts.append(Paragraph("", "\n".join(f"Note: {each}." for each in notes)))
        return parts


def answer(setup: Setup, ranks: Sequence[int], memories: Sequence[int], device: str) -> FleetAnswer:
    """Answer whether a model fits.

    Args:
        setup: what runs.
        ranks: the numbers of ranks to answer for.
        memories: the bytes of the cards to answer for; may be empty.
        device: whose memory is meant, as of `predict_peak`.

    Raises:
        CommandError: there is no such model, or it can't run so.
        PredictionError: nothing can be said of it.
    """
    setups = [replace(setup, ranks=n_ranks) for n_ranks in ranks]
    with steps("fit", patience_s=0) as show, ExitStack() as stack:
        show("reading the configuration")
        model = Configured(setup)
        peaks = _Peaks(model, device, show, stack)
        cases = [_case(peaks, each, n_bytes) for each in setups for n_bytes in memories or (None,)]
        return FleetAnswer(setups[0], model, peaks.of(setups[0]), cases)


def _case(peaks: _Peaks, setup: Setup, n_bytes: int | None) -> Case:
    peak = peaks.of(setup)
    host_bytes = peak.found.host_bytes if isinstance(peak.found, PeakReport) else None
    if n_bytes is None:
        return Case(setup.ranks, None, peak.needed_bytes, None, None, host_bytes, None, None)
    fits, spare_bytes = peak.fits(n_bytes), n_bytes - peak.needed_bytes
    remedy = None if fits else next(_remedies(peaks, setup, n_bytes), None)
    spare_bytes = max(spare_bytes, 0) if fits else spare_bytes
    largest = peaks.largest_batch(setup, n_bytes)
    return Case(
        setup.ranks, n_bytes, peak.needed_bytes, fits, spare_bytes, host_bytes, largest, remedy
    )


def _remedies(peaks: _Peaks, setup: Setup, n_bytes: int) -> Iterator[Remedy]:
    """Predict one change after another; those with which it fits."""

    def tried(what: str, **changes: Any) -> Iterator[Remedy]:
        changed = replace(setup, **changes)
        peak = peaks.of(changed)
        if peak.fits(n_bytes):
            yield Remedy(what, peak.recipe(changed), peak.needed_bytes)

    before, trains = "", setup.generate is None
    if trains and setup.optimizer == "adamw-foreach":
        yield from tried("an optimizer that steps one parameter at a time", optimizer="adamw")
    can_split = trains and setup.ranks == 1 and setup.optimizer != PAGED
    if can_split:
        yield from peaks.split(setup, n_bytes, "")
    if trains and not setup.checkpointing:
        yield from tried("checkpoints", checkpointing=True)
        setup, before = replace(setup, checkpointing=True), "checkpoints and "
        if can_split:
            yield from peaks.split(setup, n_bytes, before)
    if trains and setup.ranks > 1 and setup.shard == "fsdp2" and not setup.offloads:
        yield from tried(f"{before}shards in host memory", offloads=True)
    # the fewest ranks; what is sharded falls with the number of ranks, the rest stays
    powers = [n for n in _POWERS if n > setup.ranks and setup.optimizer != PAGED]
    sharded = replace(setup, shard="fsdp2")
    # some optimizers, such as Adafactor, step no shards
    with suppress(CommandError):
        if powers and peaks.of(replace(sharded, ranks=powers[-1])).fits(n_bytes):
            n = powers[
                bisect_left(
                    powers, True, key=lambda n: peaks.of(replace(sharded, ranks=n)).fits(n_bytes)
                )
            ]
            yield from tried(f"{before}{n} ranks, each with a device", ranks=n, shard="fsdp2")
    if trains and setup.ranks == 1 and setup.optimizer in ("adamw", "adamw-foreach"):
        yield from tried(f"{before}paging to host memory", optimizer=PAGED)


class _Peaks:
    """Predictions for one model, each made once.

    Args:
        model: its configuration.
        device: whose memory is meant.
        show: is told what is predicted.
        stack: holds what the model is made in.
    """

    def __init__(
        self, model: Configured, device: str, show: Callable[[str], None], stack: ExitStack
    ) -> None:
        self._model, self._device, self._show, self._stack = model, device, show, stack
        self._known: dict[Setup, RankPeak] = {}
        # made once for all batches: that takes as long as a prediction
        self._made: tuple[Setup, Made] | None = None

    def of(self, setup: Setup) -> RankPeak:
        """Predict the first rank.

        Raises:
            CommandError: the model can't be made, or not so.
            PredictionError: nothing can be said of it.
        """
        if setup in self._known:
            return self._known[setup]
        self._show(f"{setup.words()}, {setup.batch} at a time")
        if setup.optimizer == PAGED:
            model, batch = in_memory(setup, self._model, torch.device("meta"))
            with self._its_errors():
                plan = plan_paging(model, self._device, inputs=batch, training=True)
            needed_bytes = (plan.peak_bytes or 0) + plan.allowance_bytes
            peak = RankPeak(plan, size_of(model), needed_bytes)
        else:
            made, batch = self._work_of(setup)
            with self._its_errors():
                found = predict_peak(made.fn, batch, optimizer=made.optimizer, device=self._device)
            peak = RankPeak(found, made.size, found.needed_bytes)
        self._known[setup] = peak
        return peak

    def split(self, setup: Setup, n_bytes: int, before: str) -> Iterator[Remedy]:
        """Find the largest micro-batch of `step` that fits."""
        if setup.batch == 1:
            return
        self._show(f"{setup.words()}, in micro-batches")
        made, batch = self._work_of(setup)
        with self._its_errors():
            found = largest_micro_batch(made.fn, batch, made.optimizer, self._device, n_bytes)
        if found is not None and found.fits:
            words = f"{before}micro-batches of {counted(found.size, 'sample')}"
            yield Remedy(words, self.of(setup).recipe(setup, found.size), found.needed_bytes)

    def largest_batch(self, setup: Setup, n_bytes: int) -> int:
        """Find the largest batch that fits; it was predicted, and so was one sample more.

        Its bytes grow almost as a straight line: the last two sizes tell where to look.
        """
        low, high, n = 0, _MOST_SAMPLES, setup.batch
        before: tuple[int, int] | None = None
        while low + 1 < high:
            peak = self.of(replace(setup, batch=n))
            if peak.fits(n_bytes):
                low = n
            else:
                high = n
            # where the line leads to what is known: by halves, or doubled as long as all fit
            guess = 0
            if (
                before is not None
                and (slope := (peak.needed_bytes - before[1]) / (n - before[0])) > 0
            ):
                guess = n + int((n_bytes - peak.needed_bytes) // slope)
            before = n, peak.needed_bytes
            n = 2 * low if low and high == _MOST_SAMPLES else (low + high) // 2
            if low < guess < high:
                n = guess
        return low

    def _work_of(self, setup: Setup) -> tuple[Made, Batch]:
        alike = replace(setup, batch=1)
        if self._made is None or self._made[0] != alike:
            self._made = None
            self._stack.close()
            self._made = alike, self._stack.enter_context(making(setup, self._model))
        # ids have data: of too many, there is no memory for them
        with self._its_errors():
            return self._made[1], self._model.batch(setup.batch, torch.device("meta"))

    @contextmanager
    def _its_errors(self) -> Iterator[None]:
        """Return a block in which an error of the model is told as one of its configuration."""
        try:
            with unlogged():
                yield
        except TenureError:
            raise
        # whatever the code of a model raises
        except Exception as error:
            images, longest = self._model.images, self._model.longest
            hint = " With --images 0 text alone is counted." if images and images.n_tokens else ""
            if longest:
                hint += f" It is made for at most {longest} tokens."
            raise CommandError(
                f"A {self._model.config.model_type} fails on a batch of its configuration: "
                f"{in_a_line(error)}.{hint}"
            ) from None
