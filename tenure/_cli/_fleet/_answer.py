"""Compare what a model takes with each card and number of ranks, and find what makes it fit."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tenure._show import Code, Column, Paragraph, Part, Shown, Table, plain, steps
from tenure._text import counted, format_bytes

from ._peaks import Peaks, RankPeak
from ._setup import PAGED, Setup

FORMAT = {"format": "tenure.fit", "version": 1}
_POWERS = [1 << i for i in range(1, 11)]
"""The numbers of ranks that are looked at, where more of them are to make it fit."""
_COLUMNS = (
    Column("device memory", ">"),
    Column("ranks", ">"),
    Column("needs", ">"),
    Column("fits"),
    Column("left", ">"),
    Column("largest batch", ">"),
    Column("remedy"),
)


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
        peak: what the rank takes that takes most.
        memory_bytes: what the device has; None if nobody said.
        largest_batch: the most samples of a rank that fit; None if nobody asked.
        remedy: the first change with which the batch fits that was asked for; None if it fits, or
            if none was found.
    """

    ranks: int
    peak: RankPeak
    memory_bytes: int | None = None
    largest_batch: int | None = None
    remedy: Remedy | None = None

    @property
    def fits(self) -> bool | None:
        """True or False; None if nothing is known to compare with."""
        return None if self.memory_bytes is None else self.peak.fits(self.memory_bytes)

    @property
    def spare_bytes(self) -> int | None:
        """What is left, or what is missing; it may fit with nothing left."""
        if self.memory_bytes is None:
            return None
        spare_bytes = self.memory_bytes - self.peak.needed_bytes
        return max(spare_bytes, 0) if self.fits else spare_bytes

    def facts(self) -> dict[str, Any]:
        """Return it as values that JSON has."""
        return {
            "ranks": self.ranks,
            "memory_bytes": self.memory_bytes,
            "needed_bytes": self.peak.needed_bytes,
            "fits": self.fits,
            "spare_bytes": self.spare_bytes,
            "host_bytes": self.peak.host_bytes,
            "largest_batch": self.largest_batch,
            "remedy": None if self.remedy is None else self.remedy._asdict(),
        }


class FleetAnswer(Shown):
    """The answer for all cases.

    Args:
        setup: what was asked about.
        peaks: the predictions.
        cases: each number of ranks on each card.
    """

    _is_spaced = True

    def __init__(self, setup: Setup, peaks: Peaks, cases: Sequence[Case]) -> None:
        self._setup, self._peaks, self._cases = setup, peaks, cases
        known = [case.fits for case in cases if case.fits is not None]
        self.fits = all(known) if known else None

    def facts(self) -> dict[str, Any]:
        """Return the answer as values that JSON has."""
        first = self._cases[0]
        return {
            **FORMAT,
            "fits": self.fits,
            "work": plain(self._setup),
            "model": type(self._peaks.model.config).__name__,
            **first.peak.size._asdict(),
            "cases": [case.facts() for case in self._cases],
            "notes": self._peaks.model.notes(self._setup.sequence, self._setup.images),
            "report": plain(first.peak.found),
        }

    def _parts(self) -> list[Part]:
        first = self._cases[0]
        parts: list[Part] = [
            Paragraph("", "\n".join([*map(self._verdict, self._cases), self._about()]))
        ]
        if len(self._cases) > 1:
            parts.append(Table("", _COLUMNS, [_row(case) for case in self._cases]))
        remedies = {case.remedy.how: case.remedy for case in self._cases if case.remedy is not None}
        for each in remedies.values():
            title = f"With {each.what} a step needs {format_bytes(each.needed_bytes)}:"
            parts.append(Code(title, each.how))
        if first.fits and (self._setup.ranks > 1 or self._setup.optimizer == PAGED):
            parts.append(Code("These lines do so:", first.peak.recipe(self._setup)))
        parts += first.peak.parts()
        notes = self._peaks.model.notes(self._setup.sequence, self._setup.images)
        if self._setup.offloads:
            notes.append(
                "torch rounds each tensor in pinned memory up to a power of two, so with "
                "pin_memory=True the host needs up to twice as much for shards and gradients"
            )
        if notes:
            parts.append(Paragraph("", "\n".join(f"Note: {each}." for each in notes)))
        return parts

    def _verdict(self, case: Case) -> str:
        needed = format_bytes(case.peak.needed_bytes)
        on = f" on each of {case.ranks} ranks" if case.ranks > 1 else ""
        host = case.peak.host_bytes
        beside = "" if host is None else f", and {format_bytes(host)} of host memory"
        if case.memory_bytes is None or case.spare_bytes is None:
            return f"Needs {needed}{on}{beside}. Whether that fits, --device-memory says."
        spare_bytes = case.memory_bytes - case.peak.needed_bytes
        difference = format_bytes(abs(spare_bytes))
        told = f"yes; it needs {needed}, {difference} to spare"
        if not case.fits:
            told = f"no; it needs {needed}, {difference} too much"
        elif spare_bytes < 0:
            told = f"yes, once the allocator gives back what it caches; else it keeps {needed}"
        largest = f"largest batch {case.largest_batch}" if case.largest_batch else "no batch fits"
        return f"Fits in {format_bytes(case.memory_bytes)}{on}: {told}{beside}; {largest}."

    def _about(self) -> str:
        samples = counted(self._setup.batch, "sample")
        tokens = self._peaks.model.tokens_in_words(self._setup.sequence, self._setup.images)
        n_parameters = f"{self._cases[0].peak.size.n_parameters / 1e6:,.1f} million parameters"
        model_type = self._peaks.model.config.model_type
        return f"{model_type}, {n_parameters}; {samples} of {tokens}: {self._setup.words()}."


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
    for each in setups:
        each.check()
    with steps("fit", patience_s=0) as show, Peaks(setup.target, device, show) as peaks:
        peaks.model.check(sequence=setup.sequence, generate=setup.generate, images=setup.images)
        cases = [_case(peaks, each, n_bytes) for each in setups for n_bytes in memories or (None,)]
    return FleetAnswer(setups[0], peaks, cases)


def _case(peaks: Peaks, setup: Setup, n_bytes: int | None) -> Case:
    peak = peaks.of(setup)
    if n_bytes is None:
        return Case(setup.ranks, peak)
    remedy = None
    if not peak.fits(n_bytes):
        remedy = next(_remedies(peaks, setup, n_bytes), None)
    return Case(setup.ranks, peak, n_bytes, peaks.largest_batch(setup, n_bytes), remedy)


def _remedies(peaks: Peaks, setup: Setup, n_bytes: int) -> Iterator[Remedy]:
    """Predict one change after another; those with which it fits."""

    def tried(what: str, changed: Setup) -> Iterator[Remedy]:
        peak = peaks.of(changed)
        if peak.fits(n_bytes):
            yield Remedy(what, peak.recipe(changed), peak.needed_bytes)

    if setup.generate is not None:
        yield from _more_ranks(peaks, setup, n_bytes, "")
        return
    if setup.optimizer == "adamw-foreach":
        changed = replace(setup, optimizer="adamw")
        yield from tried("an optimizer that steps one parameter at a time", changed)
    can_split = setup.ranks == 1 and setup.optimizer != PAGED
    if can_split:
        yield from _split(peaks, setup, n_bytes, "")
    before = ""
    if not setup.checkpointing:
        setup, words = replace(setup, checkpointing=True), "checkpoints"
        yield from tried(words, setup)
        before = f"{words} and "
        if can_split:
            yield from _split(peaks, setup, n_bytes, before)
    if setup.ranks > 1 and setup.shard == "fsdp2" and not setup.offloads:
        yield from tried(f"{before}shards in host memory", replace(setup, offloads=True))
    yield from _more_ranks(peaks, setup, n_bytes, before)
    if setup.ranks == 1 and setup.optimizer in ("adamw", "adamw-foreach"):
        yield from tried(f"{before}paging to host memory", replace(setup, optimizer=PAGED))


def _split(peaks: Peaks, setup: Setup, n_bytes: int, before: str) -> Iterator[Remedy]:
    found = peaks.micro_batch(setup, n_bytes)
    if found is not None and found.fits:
        words = f"{before}micro-batches of {counted(found.size, 'sample')}"
        how = peaks.of(setup).recipe(setup, maximum=found.size)
        yield Remedy(words, how, found.needed_bytes)


def _more_ranks(peaks: Peaks, setup: Setup, n_bytes: int, before: str) -> Iterator[Remedy]:
    """Shard over the fewest ranks, a power of two, with which it fits; up to five predictions."""

    def on(ranks: int) -> Setup:
        return replace(setup, ranks=ranks, shard="fsdp2")

    powers = [ranks for ranks in _POWERS if ranks > setup.ranks]
    if setup.optimizer == PAGED or not powers or not peaks.of(on(powers[-1])).fits(n_bytes):
        return
    # what is sharded falls with the number of ranks, the rest stays
    hi = len(powers) - 1
    at = bisect_left(powers, True, hi=hi, key=lambda ranks: peaks.of(on(ranks)).fits(n_bytes))
    changed = on(powers[at])
    peak = peaks.of(changed)
    words = f"{before}{powers[at]} ranks, each with a device"
    yield Remedy(words, peak.recipe(changed), peak.needed_bytes)


def _row(case: Case) -> tuple[str, ...]:
    memory = "" if case.memory_bytes is None else format_bytes(case.memory_bytes)
    fits = {None: "", True: "yes", False: "no"}[case.fits]
    spare = "" if case.spare_bytes is None else format_bytes(case.spare_bytes)
    largest = "" if case.largest_batch is None else str(case.largest_batch)
    remedy = case.remedy.what if case.remedy is not None else ""
    needed = format_bytes(case.peak.needed_bytes)
    return memory, str(case.ranks), needed, fits, spare, largest, remedy
