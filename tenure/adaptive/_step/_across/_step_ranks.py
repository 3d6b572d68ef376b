"""What a step does for other ranks: its weight beside theirs, one vote, and the sum of gradients.

Invariant: what may fail or run out of memory comes before the vote, inside the attempt; after the
vote ranks only exchange. Each gradient is multiplied by the share of its rank and summed up, so
that all have that of the whole batch of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tenure._errors import AdaptiveUsageError
from tenure._text import describe_tensor
from tenure._torch.autograd import post_hooks_of
from tenure._torch.replicas import exchanged_buffers

from ..._callables import name_of
from ..._ranks import Ballot, RankCall, Replicated, Tally, mark_of, weights_of
from .._split import StepOutcome, StepParts, StepSpec
from ._alike import asked_by, numbers_of, refuse_other_terms, shares_of
from ._summed_gradients import Exchange, shapes_of
from ._values import Values

_WITHOUT_SAMPLES = torch.empty(0, device="cpu")


class _Replica(NamedTuple):
    """A replica, and what it would do in a plain step.

    Attributes:
        module: the replica.
        exchanges: whether its backward pass would exchange gradients.
        brings_buffers: whether its forward pass would bring buffers of one rank to all.
    """

    module: Replicated
    exchanges: bool
    brings_buffers: bool


class StepRanks:
    """The ranks of one call.

    Args:
        call: the call of all ranks.
        spec: the step of this one.
        shared: the replicas that it runs.
        per_rank: whether the loss is each rank's own.
        takes_all: whether gradients of all modules are exchanged, also of such as are no replicas.

    Attributes:
        n_samples: of all ranks, after `agree`.
    """

    def __init__(
        self,
        call: RankCall,
        spec: StepSpec,
        shared: list[Replicated],
        *,
        per_rank: bool,
        takes_all: bool,
    ) -> None:
        self._call = call
        self._spec = spec
        self._per_rank = per_rank
        self._takes_all = takes_all
        self._replicas = [
            _Replica(each, each.require_backward_grad_sync, each.will_sync_module_buffers())
            for each in shared
        ]
        self._adds_up = spec.loss == "sum"
        self._weight: float | None = None
        self._mark = 0
        self.n_samples = 0

    def check_not_gone(self) -> None:
        """Make sure that an attempt may begin: one after the vote would wait for ever.

        Raises:
            AdaptiveUsageError: the others have gone on.
        """
        if self._call.has_voted:
            raise AdaptiveUsageError(
                "step() ran out of memory on this rank as gradients were delivered, after all "
                "ranks had agreed: others have theirs, and this one has those of before, so that "
                "parameters would differ from here on. Begin again from a checkpoint, with more "
                "memory free."
            )

    def own_spec(self) -> StepSpec:
        """The step of this rank, which may have no samples."""
        spec = self._spec
        # a sum over all ranks has it once; of a mean each has its share of it
        if self._adds_up and not self._per_rank and self._call.group.rank:
            spec = replace(spec, once=None)
        if spec.batch is None:
            spec = replace(spec, batch=_WITHOUT_SAMPLES, in_dims=0)
        return spec

    def begin(self, parts: StepParts) -> None:
        """Find out what is exchanged, and what the samples of this rank weigh.

        Raises:
            AdaptiveUsageError: what is asked for can't be done by several ranks.
            RemoteRankError: another rank has failed already.
        """
        self._parts = parts
        self._exchanged = self._parameters()
        _refuse_hooks(self._exchanged)
        if parts.inputs.has_graph:
            raise AdaptiveUsageError(
                "step() got a batch that was computed with gradients, on several ranks: what it "
                "comes of would get them before ranks have agreed. Nothing was changed. Compute it "
                "in the function of step(), or detach() it."
            )
        spec = self._spec
        brought = [b for each in self._brought() for b in exchanged_buffers(each)]
        asked, shapes = asked_by(spec, per_rank=self._per_rank), shapes_of(self._exchanged)
        self._mark = mark_of(spec.entry, name_of(spec.fn), asked, shapes, shapes_of(brought))
        n_elements = sum(buffer.numel() for buffer in brought)
        buffers = f", {len(brought)} buffers of {n_elements} elements" if brought else ""
        self._call.name += f" ({asked}; {len(shapes)} parameters{buffers})"
        if spec.weight is not None and parts.n_samples and not self._per_rank:
            self._weigh(spec.weight)

    def agree(self, outcome: StepOutcome | None) -> StepOutcome:
        """Vote, and exchange gradients; the last that an attempt does.

        Args:
            outcome: what this rank has got of its samples; None where it has none.

        Returns:
            The same of all ranks; with ``per_rank`` this rank's own.

        Raises:
            RemoteRankError: another rank has failed.
        """
        parts, group = self._parts, self._call.group
        if outcome is None and parts.spec.once is not None and self._adds_up:
            parts.backward.run([parts.backward.scaled(parts.once())], [None])
        parts.gradients.run_hooks()
        self._refuse_unknown()
        exchange = Exchange(group, parts.gradients, self._exchanged, self._brought())
        weight = self._own_weight(outcome)
        values = Values(parts, outcome)
        has_data = int(outcome is not None)
        # nothing may fail from here on: see Note [Votes], rule 2
        tally = self._vote(
            Ballot(
                self._mark,
                n_with_data=has_data,
                n_samples=parts.n_samples,
                weight=weight,
                n_missing=exchange.n_missing,
                size=self._mark_of_terms(outcome, exchange),
            )
        )
        self.n_samples = tally.n_samples
        share = self._share(weight, tally)
        if tally.n_with_data:
            exchange.run(share, self._own_factors(share), tally, has_data=bool(has_data))
        else:
            exchange.drop()
        for replica in self._replicas:
            replica.module.require_forward_param_sync = replica.exchanges
        if self._per_rank:
            return values.own()
        return values.of_all(group, share, tally.n_with_data, is_sum=self._adds_up)

    def _parameters(self) -> list[Tensor]:
        """Those whose gradients are exchanged, in an order that is the same on all ranks."""
        parts = self._parts
        found = [
            parameter
            for replica in self._replicas
            if replica.exchanges
            for name, parameter in replica.module.module.named_parameters()
            if name not in replica.module.parameters_to_ignore
        ]
        if self._takes_all:
            waiting = {id(each) for each in self._waiting()}
            found += [leaf for leaf in parts.trained if id(leaf) not in waiting]
        by_id = {id(each): each for each in found if each.requires_grad}
        return list(by_id.values())

    def _waiting(self) -> list[Tensor]:
        """Those of replicas in a block of ``no_sync()``, which exchange them some time later."""
        return [
            parameter
            for replica in self._replicas
            if not replica.exchanges
            for parameter in replica.module.parameters()
        ]

    def _weigh(self, weight: Any) -> None:
        """Ask what the samples weigh; where terms weigh differently, all ranks have to know."""
        parts = self._parts
        numbers = numbers_of(weight, parts)
        if None in numbers:
            self._weight = numbers[None]
            return
        own = {str(name): number for name, number in numbers.items()}
        ballot = Ballot(
            self._mark,
            n_early=1,
            n_with_data=1,
            n_samples=parts.n_samples,
            size=mark_of(*own),
            weights=weights_of(own.values(), "weight() returned weights of"),
        )
        tally = self._call.vote(ballot)
        if tally.n_early < tally.n_with_data or not tally.is_one_size:
            refuse_other_terms(own)
        parts.factors = shares_of(own, tally.weights, parts.n_samples / tally.n_samples)
        parts.share_of_once = 1 / tally.n_with_data
        self._adds_up = True
        self._call.go_on()

    def _vote(self, ballot: Ballot) -> Tally:
        tally = self._call.vote(ballot)
        if not tally.n_early:
            if not tally.is_one_size:
                raise AdaptiveUsageError(
                    "The function of step() returned other terms on one rank than on another, or "
                    "in another order, or with a count on one of them alone, or has left a replica "
                    "with buffers of other shapes: no rule makes one of these. Nothing was "
                    "delivered. Keep buffers alike, and return the same names, in one order, "
                    "each with a count on all ranks or on none; a rank where nothing counts "
                    "returns a count of 0."
                )
            return tally
        # others had to know first what terms weigh, which a rank without samples can't tell
        if tally.n_early < tally.n_with_data or not tally.is_one_size:
            refuse_other_terms([])
        return self._vote(ballot)

    def _brought(self) -> list[Replicated]:
        """The replicas whose buffers become those of one rank."""
        return [each.module for each in self._replicas if each.brings_buffers]

    def _mark_of_terms(self, outcome: StepOutcome | None, exchange: Exchange) -> int:
        """A number for what the function returned and left; 0 where ranks need not be alike."""
        if outcome is None:
            return 0
        terms = [] if self._per_rank else [*outcome.terms, "counts", *self._parts.counts]
        return mark_of(*terms, exchange.mark_of_buffers)

    def _own_weight(self, outcome: StepOutcome | None) -> float:
        """What the mean over the samples of this rank divides by."""
        parts = self._parts
        if outcome is None:
            return 0.0
        if self._per_rank or self._adds_up:
            return 1.0
        if len(outcome.terms) > 1 and parts.counts:
            raise AdaptiveUsageError(
                "The function of step() returned several terms, and a count with "
                f"{', '.join(map(repr, parts.counts))}: on several ranks each would have another "
                "weight, and they are known only when all has run. Nothing was changed. Return "
                "means, and give what each divides by, from labels alone, as weight=."
            )
        if parts.counts:
            (number,) = parts.counts.values()
            count = float(number)
            # one process divides by it, and gets 0 or nan; shares of it say nothing to the others
            if not math.isfinite(count):
                raise AdaptiveUsageError(
                    f"The function of step() returned a count of {count} on this rank, by which "
                    "its share of the loss of all ranks can't be told. Nothing was delivered. "
                    "Return how many elements the sum has."
                )
            return count
        return float(parts.n_samples) if self._weight is None else self._weight

    def _share(self, weight: float, tally: Tally) -> float:
        """What the gradients of this rank are multiplied by before they are summed up."""
        if self._per_rank:
            return 1 / self._call.group.size
        if self._adds_up or not tally.n_with_data:
            return 1.0
        if tally.weight:
            return weight / tally.weight
        # the mean over nothing has no value: what stands there on one rank, stands there on all
        return self._parts.n_samples / tally.n_samples

    def _own_factors(self, share: float) -> Mapping[int, float]:
        """What gradients are multiplied by that are not exchanged; that of 0 is for all others."""
        n = self._call.group.size
        # of what is averaged over ranks later the average has to be that of the whole
        waiting = {id(each): n * share for each in self._waiting()}
        is_own = self._per_rank or (self._adds_up and self._parts.factors is None)
        return {0: 1.0 if is_own else n * share, **waiting}

    def _refuse_unknown(self) -> None:
        """Make sure that no gradient is left out because its parameter was seen too late."""
        if not self._takes_all:
            return
        known = {id(each) for each in (*self._exchanged, *self._waiting())}
        for leaf, _ in self._parts.gradients.new():
            if isinstance(leaf, nn.Parameter) and id(leaf) not in known:
                raise AdaptiveUsageError(
                    f"step() has trained a parameter, {describe_tensor(leaf)}, that it has not "
                    "found through its function, so that other ranks don't expect its gradient. "
                    "Nothing was changed. Pass the modules that the function runs as model=."
                )


def _refuse_hooks(parameters: list[Tensor]) -> None:
    hooked = [parameter for parameter in parameters if post_hooks_of(parameter)]
    if hooked:
        raise AdaptiveUsageError(
            f"{len(hooked)} of the parameters have a hook from register_post_accumulate_grad_hook"
            "(), which would run with the gradient of one rank, before ranks have agreed. Nothing "
            "was changed. Do its work after step()."
        )
