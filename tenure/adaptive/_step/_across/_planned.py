"""A step of sharded modules, whose passes wait for all ranks: planned before, run once.

Invariant: before anything runs all ranks have agreed on how many micro-batches there are, and each
runs so many; nothing is run again. What a rank has to say goes over connections of its own, so that
it never meets a collective of the modules in which another rank waits.

Gradients are exchanged with each micro-batch: held back they would be whole on every rank, as large
as all parameters, which is what sharding is there to avoid.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from tenure._errors import AdaptiveUsageError, OutOfRetriesError, TenureError
from tenure._oom import OomInfo, oom_of_work
from tenure._text import describe_tensor, format_bytes, listed
from tenure._torch.sharding import Shards

from ..._attempt import memory_of, release
from ..._ranks import Ballot, RankCall, lost_rank_error, mark_of
from ..._sizes import AdaptiveSearch
from .._arguments import StepSpec
from .._parts import StepParts
from .._split import StepOutcome
from ._alike import LossOfAll, asked_by, refuse_other_terms, share_of, weight_of
from ._exchange import multiply

_PATIENCE_S = 10.0
"""So long a rank that has failed waits for the others, most of which are inside a collective."""
_ROUNDING = 1e-12
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
        self._spec = spec
        self._shards = shards
        self._per_rank = per_rank
        self._share = 1.0
        self._has_direct = False
        self.n_samples = 0

    def own_spec(self) -> StepSpec:
        """Return the step of this rank.

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
        spec = self._spec
        if spec.once is not None:
            raise AdaptiveUsageError(
                f"{spec.entry}() got once=, and its modules are sharded: ranks would have to agree "
                "on its share in each shard. Nothing was run. Run backward from it after "
                f"{spec.entry}(), on every rank."
            )
        weight = float(parts.n_samples) if self._per_rank else weight_of(parts)
        # ranks have parts of other shapes, and names of their own for what they run
        asked, n = asked_by(spec, per_rank=self._per_rank), len(parts.trained)
        self._mark = mark_of(spec.entry, asked, n)
        self._call.name += f" ({asked}; {n} parameters)"
        tally = self._vote(
            Ballot(self._mark, n_with_data=1, n_samples=parts.n_samples, weight=weight)
        )
        _refuse_settings(spec.entry, self._shards, per_rank=self._per_rank)
        self.n_samples = tally.n_samples
        parts.backward.unhooked = frozenset(map(id, self._shards.shards()))
        if self._per_rank:
            return
        # ranks that are parallel over tensors have the same samples
        n_copies = self._call.group.size // self._shards.n_averaged
        is_sum = spec.loss == "sum"
        self._share = 1 / n_copies if is_sum else share_of(weight, parts.n_samples, tally)
        (divisor,) = self._shards.divisors
        factor = divisor * n_copies * self._share
        # 1 costs nothing, and is what equal ranks have
        parts.factor = 1.0 if abs(factor - 1) < _ROUNDING else factor
        if is_sum or parts.factor != 1:
            parts.around_backward = self._noting_direct

    def plan(self, search: AdaptiveSearch) -> None:
        """Agree on the micro-batches: on all ranks as many as the one needs that needs the most.

        Raises:
            AdaptiveUsageError: a rank has too few samples for that.
            RemoteRankError: another rank has failed.
        """
        parts, n = self._parts, self._parts.n_samples
        # what fits on all, then the most micro-batches, and the fewest samples; a batch that fits
        # as a whole says nothing of larger ones
        size = search.size if search.size < n else sys.maxsize
        size = self._vote(Ballot(self._mark, n_with_data=1, size=size)).size
        tally = self._vote(Ballot(self._mark, n_with_data=1, size=-n // size, least=n))
        n_parts, fewest = -tally.size, tally.least
        if n_parts > 1 and fewest // n_parts < parts.smallest:
            raise AdaptiveUsageError(
                f"The batch has to be split into {n_parts} micro-batches on every rank, because "
                f"sharded modules run on all at once, and one rank has {fewest} samples. Nothing "
                f"was run. Give every rank at least {n_parts * parts.smallest} samples."
            )
        parts.n_parts = n_parts
        search.at_most(-(-n // n_parts))

    def _vote(self, ballot: Ballot) -> Ballot:
        """Vote, and work on."""
        tally = self._call.vote(ballot)
        self._call.go_on()
        return tally

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
        if self._per_rank:
            self._call.vote(Ballot(self._mark))
            return outcome
        self._finish_gradients()
        loss = LossOfAll(self._parts, outcome)
        values, terms = loss.times(self._share), mark_of(*outcome.terms)
        tally = self._call.vote(Ballot(self._mark, n_with_data=1, size=terms, values=values))
        refuse_other_terms(tally)
        return loss.of_all(tally, is_sum=True)

    @contextmanager
    def _noting_direct(self) -> Iterator[None]:
        """Return a block in which a shard tells of a gradient that no module averages over ranks.

        A penalty on ``model.parameters()`` gives one. The gradients of modules are multiplied by
        the factor of this rank, because they are averaged; such a one would get it, too.
        """

        def note(_: Tensor) -> None:
            self._has_direct = True

        # autograd runs them, and not the module that brings a gradient that was averaged
        trained = [shard for shard in self._shards.shards() if shard.requires_grad]
        with ExitStack() as hooks:
            for shard in trained:
                hooks.enter_context(shard.register_hook(note))
            yield

    def _finish_gradients(self) -> None:
        """Make sure that gradients of parameters are those of all ranks; scale the others."""
        entry, parts = self._spec.entry, self._parts
        if parts.counts:
            raise AdaptiveUsageError(
                "The function of step() returned a count with "
                f"{', '.join(map(repr, parts.counts))}, which is known only when sharded modules "
                "have exchanged gradients. Nothing was delivered. Return a mean, and give what it "
                "divides by, from labels alone, as weight=; or pass per_rank=True."
            )
        if self._has_direct:
            raise AdaptiveUsageError(
                f"The loss of {entry}() depends on shards of parameters directly, as by a penalty "
                "on model.parameters(). No module averages its gradient over ranks, which have "
                "different shares of this loss. Nothing was delivered. Run backward from the "
                f"penalty after {entry}(), on every rank."
            )
        # ranks that are parallel over tensors have the same samples, and so the same gradients
        if self._shards.n_averaged == 1:
            return
        # asked now: the first pass finds parameters that were replaced
        brought = {id(shard) for shard in self._shards.shards()}
        for leaf, gradient in parts.gradients.new():
            if id(leaf) in brought:
                continue
            if isinstance(leaf, nn.Parameter):
                name = parts.leaf_names.get(id(leaf)) or _name_of(leaf, parts)
                raise AdaptiveUsageError(
                    f"{entry}() has trained {name}, {describe_tensor(leaf)}, which no module of "
                    "fully_shard has: nobody brings its gradient to other ranks. Nothing was "
                    "delivered. Call fully_shard() on the root of the model, too, after its "
                    "layers; freeze it; or pass per_rank=True, and average its gradient yourself."
                )
            # nobody divides it
            n_own = 1 if self._spec.loss == "sum" else self._shards.n_averaged
            multiply(gradient, n_own / self._shards.divisors[0])


def _is_of_an_exchange(error: BaseException) -> TypeGuard[Exception]:
    """Return whether a collective of the modules raised it."""
    distributed: Any = torch.distributed
    if isinstance(error, TenureError) or not isinstance(error, RuntimeError):
        return False
    # gloo has no class for its errors, and names the file that raised
    return isinstance(error, distributed.DistError) or "/gloo/" in str(error)


def refuse_group(entry: str, group: Any, shards: Shards) -> None:
    """Make sure that ranks can vote in a group, and are those of the modules.

    Raises:
        AdaptiveUsageError: they are not.
    """
    distributed: Any = torch.distributed
    members = distributed.get_process_group_ranks(group)
    is_world = group is distributed.group.WORLD
    # not those of which this process is none: they are told so later
    if distributed.get_rank(group) >= 0 and shards.ranks != set(members):
        raise AdaptiveUsageError(
            f"{entry}() got modules that are sharded over {_ranks(shards.ranks)}, and "
            f"{_ranks(members)} would make the step together, "
            f"{'all that there are' if is_world else 'those of group='}: what the others have "
            "belongs to another model, or is copied, and nobody can tell. Nothing was changed. "
            "Shard the modules over a mesh of all ranks; or name a group of theirs alone, beside "
            f'those in which they talk: group=new_group({sorted(shards.ranks)}, backend="gloo").'
        )
    if not is_world and any(group is each for each in shards.process_groups):
        raise AdaptiveUsageError(
            f"{entry}() got a group= in which its sharded modules talk: what a rank that fails "
            "says there would meet their collectives. Nothing was changed. Leave group= out where "
            "these are all ranks, or name another group of them: "
            f'group=new_group({sorted(members)}, backend="gloo").'
        )


def _refuse_settings(entry: str, shards: Shards, *, per_rank: bool) -> None:
    """Make sure that gradients are exchanged with each micro-batch, all on one scale.

    Raises:
        AdaptiveUsageError: they are not.
    """
    if not shards.exchanges:
        raise AdaptiveUsageError(
            f"{entry}() got modules of fully_shard that were told to exchange no gradients, by "
            "set_requires_gradient_sync(False) or set_requires_all_reduce(False), so that what "
            "they leave could not be told from what comes. Nothing was changed. Pass the samples "
            "of all passes to one step(), which accumulates by itself, without these settings."
        )
    if len(shards.divisors) > 1 and not per_rank:
        raise AdaptiveUsageError(
            f"{entry}() got modules of fully_shard that divide gradients by "
            f"{listed([f'{each:g}' for each in shards.divisors], most=6)}, so that a loss over all "
            "samples has no one scale. Nothing was changed. Give all of them the same factor by "
            "set_gradient_divide_factor(), also the root; or pass per_rank=True, where gradients "
            "are those of a plain pass."
        )


def _no_samples(rank: int) -> AdaptiveUsageError:
    return AdaptiveUsageError(
        f"step() got no samples on rank {rank}, and its modules are sharded: they run on all ranks "
        "at once, or on none. Nothing was run. Give every rank samples, or end the epoch on all."
    )


def _name_of(leaf: Tensor, parts: StepParts) -> str:
    names = (n for root in parts.roots.values() for n, p in root.named_parameters() if p is leaf)
    return next((f"the parameter {name!r}" for name in names), "a parameter")


def _ranks(members: Any) -> str:
    return f"ranks {listed([*map(str, sorted(members))], most=8)}"
