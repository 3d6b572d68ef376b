"""A step of sharded modules, whose passes wait for all ranks: planned before, run once.

Invariant: before anything runs all ranks have agreed on how many micro-batches there are, and each
runs so many; nothing is run again. What a rank has to say goes over connections of its own, so that
it never meets a collective of the modules in which another rank waits.

Gradients are exchanged with each micro-batch: held back they would be whole on every rank, as large
as all parameters, which is what sharding is there to avoid.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import TypeGuard

from tenure._errors import AdaptiveUsageError, OutOfRetriesError, TenureError
from tenure._oom import OomInfo, oom_of_work
from tenure._text import format_bytes
from tenure._torch.quiet import without_functions
from tenure._torch.sharding import Shards

from ..._attempt import memory_of, release
from ..._ranks import Ballot, RankCall, lost_rank_error, mark_of, weights_of
from ..._sizes import AdaptiveSearch
from .._split import StepOutcome, StepParts, StepSpec
from ._alike import asked_by, numbers_of, refuse_other_terms, shares_of
from ._sharded import ShardGradients, refuse_late, refuse_settings

_PATIENCE_S = 10.0
"""So long a rank that has failed waits for the others, most of which are inside a collective."""
_ROUNDING = 1e-12
_ALL = ""
"""The name of a weight that is that of all terms."""
_AFTER = (
    "Gradients are as before, and the next step() plans for less: call it on all ranks, if all "
    "have ended this one. A rank that still waits inside a module can't be reached: it gets an "
    "error when this process ends, or at the timeout of its process group. To plan by hand"
)


class PlannedRanks:
    """The ranks of one call whose modules are sharded.

    Args:
        call: the call of all ranks.
        spec: the step of this one.
        shards: what is sharded by ``fully_shard``.
        per_rank: whether the loss is each rank's own.

    Attributes:
        n_samples: of all ranks, after `plan`.
    """

    def __init__(self, call: RankCall, spec: StepSpec, shards: Shards, *, per_rank: bool) -> None:
        self._call = call
        # a call before may have failed, and others may be slow
        call.group.patience_s = None
        self._spec = spec
        self._shards = shards
        self._per_rank = per_rank
        self.n_samples = 0

    def own_spec(self) -> StepSpec:
        """The step of this rank.

        Raises:
            AdaptiveUsageError: it has no samples.
        """
        if self._spec.batch is None:
            raise _no_samples(self._call.group.rank)
        return replace(self._spec, is_planned=True)

    def begin(self, parts: StepParts) -> None:
        """Agree on what the samples of this rank weigh beside those of all.

        Raises:
            AdaptiveUsageError: a rank has no samples, or what is asked for can't be done.
            RemoteRankError: another rank has failed already.
        """
        self._parts = parts
        if not parts.n_samples:
            raise _no_samples(self._call.group.rank)
        spec, numbers = self._spec, self._numbers()
        # ranks have parts of other shapes, and names of their own for what they run
        asked, n = asked_by(spec, per_rank=self._per_rank), len(parts.trained)
        self._mark = mark_of(spec.entry, asked, n)
        self._call.name += f" ({asked}; {n} parameters)"
        tally = self._call.vote(
            Ballot(
                self._mark,
                n_with_data=1,
                n_samples=parts.n_samples,
                size=mark_of(*numbers),
                weights=weights_of(numbers.values(), "weight() returned weights of"),
            )
        )
        if not tally.is_one_size:
            refuse_other_terms(name for name in numbers if name != _ALL)
        refuse_settings(spec.entry, self._shards, per_rank=self._per_rank)
        self._call.go_on()
        self.n_samples = tally.n_samples
        # ranks that are parallel over tensors have the same samples
        n_copies = self._call.group.size // self._shards.n_averaged
        if spec.loss == "sum":
            self._shares = dict.fromkeys(numbers, 1 / n_copies)
        else:
            by_samples = parts.n_samples / tally.n_samples
            self._shares = shares_of(numbers, tally.weights, by_samples)
        if self._per_rank:
            return
        (divisor,) = self._shards.divisors
        factors = {n: _rounded(divisor * n_copies * s) for n, s in self._shares.items()}
        if any(factor != 1 for factor in factors.values()):
            parts.factors = _Everywhere(factors[_ALL]) if _ALL in factors else factors
        # of what is the same on all ranks the average is what is wanted
        parts.share_of_once = _rounded(divisor / self._shards.n_averaged)
        one, *others = set(factors.values())
        is_one = not others and one and spec.loss != "sum"
        self._direct = ShardGradients(self._shards, one if is_one else None, parts.share_of_once)
        parts.around_backward = self._direct.of_chunk
        parts.around_once = self._direct.of_what_is_added_once

    def plan(self, search: AdaptiveSearch) -> None:
        """Agree on the micro-batches: on all ranks as many as the one needs that needs the most.

        Raises:
            AdaptiveUsageError: a rank has too few samples for that.
            RemoteRankError: another rank has failed.
        """
        parts, call = self._parts, self._call
        n, size = parts.n_samples, search.size
        call.vote(Ballot(self._mark))
        call.go_on()
        # what fits on all, then the most micro-batches, and the fewest samples; a batch that fits
        # as a whole says nothing of larger ones
        (least,) = call.group.smallest([size if size < n else sys.maxsize])
        n_own = -(-n // least)
        less, fewest = call.group.smallest([-n_own, n])
        n_parts = -less
        if n_parts > 1 and fewest // n_parts < parts.smallest:
            raise AdaptiveUsageError(
                f"The batch has to be split into {n_parts} micro-batches on every rank, because "
                f"sharded modules run on all at once, and one rank has {fewest} samples. Nothing "
                f"was run. Give every rank at least {n_parts * parts.smallest} samples."
            )
        parts.n_parts = n_parts
        search.at_most(-(-n // n_parts))

    def run(
        self, search: AdaptiveSearch, work: Callable[[int], StepOutcome], told: str
    ) -> StepOutcome:
        """Run the step, once.

        Args:
            search: its size; it learns how that went.
            work: runs the step.
            told: what was predicted, in words.

        Raises:
            OutOfRetriesError: it ran out of memory on this rank.
            RemoteRankError: it failed on another one.
        """
        state, size, outside = self._parts.rollback(), search.size, sys.exception()
        state.begin()
        try:
            outcome = self._agree(work(size))
            state.finish()
        except BaseException as error:
            self._call.group.patience_s = _PATIENCE_S
            state.undo()
            self._shards.reset()
            info = oom_of_work(error, outside)
            if info is None:
                if _is_of_an_exchange(error):
                    raise lost_rank_error(error, self._call.group.size) from error
                raise
            failure = error
        else:
            search.succeeded()
            search.finished()
            return outcome
        # what its traceback holds would be missing in the next step
        release(failure, outside)
        search.shrink(info)
        try:
            raise self._out_of_memory(info, size, told) from failure
        finally:
            del failure

    def _out_of_memory(self, info: OomInfo, size: int, told: str) -> OutOfRetriesError:
        rank = self._call.group.rank
        requested = info.requested_bytes
        needed = "" if requested is None else f" (wanted {format_bytes(requested)} more)"
        return OutOfRetriesError(
            f"{self._parts.name!r} ran out of {memory_of(info)} on rank {rank}, in micro-batches "
            f"of {size}{needed}; {told}. Its modules are sharded, so that nothing can be run again "
            f"while other ranks wait inside of them. {_AFTER}, pass maximum= below {size}.",
            (size,),
            info,
        )

    def _agree(self, outcome: StepOutcome) -> StepOutcome:
        """Hear of the others; the loss of all."""
        parts = self._parts
        if self._per_rank:
            self._call.vote(Ballot(self._mark))
            return outcome
        refuse_late(self._spec.entry, parts, self._shards, self._direct)
        if parts.counts:
            raise AdaptiveUsageError(
                "The function of step() returned a count with "
                f"{', '.join(map(repr, parts.counts))}, which is known only when sharded modules "
                "have exchanged gradients. Nothing was delivered. Return a mean, and give what it "
                "divides by, from labels alone, as weight=; or pass per_rank=True."
            )
        (shared, *others) = self._shares.values()
        shares = [self._shares.get(name, shared) for name in outcome.terms]
        with without_functions():
            extra = 0.0 if parts.added is None else float(parts.added)
            terms = [
                _weighed(float(term), share)
                for term, share in zip(outcome.terms.values(), shares, strict=True)
            ]
            whole = sum(terms) if others else _weighed(float(outcome.loss) - extra, shared)
            # values in the room for weights: what a vote sums up is what is wanted of them
            summed = weights_of(terms, "The function of step() returned")
            tally = self._call.vote(Ballot(self._mark, weight=whole, weights=summed))
            loss, *of_terms = (
                outcome.loss.new_full((), value)
                for value in (tally.weight, *tally.weights[: len(terms)])
            )
            return replace(
                outcome, loss=loss + extra, terms=dict(zip(outcome.terms, of_terms, strict=True))
            )

    def _numbers(self) -> dict[str, float]:
        """What the samples of this rank weigh, by term."""
        weight, parts = self._spec.weight, self._parts
        if weight is None or self._per_rank:
            return {_ALL: float(parts.n_samples)}
        numbers = numbers_of(weight, parts)
        return {_ALL if name is None else name: number for name, number in numbers.items()}


def _is_of_an_exchange(error: BaseException) -> TypeGuard[Exception]:
    """Whether a collective of the modules has raised it: the group's own errors have no class."""
    if not isinstance(error, RuntimeError) or isinstance(error, TenureError):
        return False
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).startswith("torch.distributed")


def _weighed(value: float, share: float) -> float:
    # the mean of nothing is nan, which zero times it would stay
    return value * share if share else 0.0


def _rounded(factor: float) -> float:
    # 1 costs nothing, and is what equal ranks have
    return 1.0 if abs(factor - 1) < _ROUNDING else factor


class _Everywhere(dict[str, float]):
    """One factor, whatever the name of the term."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self._factor = factor

    def __contains__(self, _: object) -> bool:
        return True

    def __missing__(self, _: str) -> float:
        return self._factor


def _no_samples(rank: int) -> AdaptiveUsageError:
    return AdaptiveUsageError(
        f"step() got no samples on rank {rank}, and its modules are sharded: they run on all ranks "
        "at once, or on none. Nothing was run. Give every rank samples, or end the epoch on all."
    )
