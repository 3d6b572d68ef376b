"""A step with other ranks: its weight beside theirs, one vote, and the sum of gradients.

Invariant: what may fail or run out of memory comes before the vote, inside the attempt; after the
vote ranks only exchange. Each gradient is multiplied by the share of its rank and summed up, so
that all have that of the whole batch of all ranks.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tenure._errors import AdaptiveUsageError
from tenure._text import describe_tensor
from tenure._torch.autograd import post_hooks_of
from tenure._torch.quiet import without_functions
from tenure._torch.replicas import exchanged_buffers

from ..._callables import told_apart
from ..._ranks import Ballot, RankCall, Replicated, mark_of
from .._arguments import StepSpec
from .._parts import StepParts
from .._split import StepOutcome
from ._alike import LossOfAll, asked_by, refuse_other_terms, share_of, weight_of
from ._exchange import Exchange, multiply, shapes_of

_WITHOUT_SAMPLES = torch.empty(0, device="cpu")


class _ReplicaState(NamedTuple):
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
            _ReplicaState(each, each.require_backward_grad_sync, each.will_sync_module_buffers())
            for each in shared
        ]
        self._adds_up = spec.loss == "sum"
        self._weight = 0.0
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
        """Return the step of this rank, which may have no samples."""
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
        if parts.inputs.computed:
            raise AdaptiveUsageError(
                "step() got a batch that was computed with gradients, on several ranks: what it "
                "comes of would get them before ranks have agreed. Nothing was changed. Compute it "
                "in the function of step(), or detach() it."
            )
        spec = self._spec
        brought = [b for each in self._brought() for b in exchanged_buffers(each)]
        asked, shapes = asked_by(spec, per_rank=self._per_rank), shapes_of(self._exchanged)
        self._mark = mark_of(spec.entry, told_apart(spec.fn), asked, shapes, shapes_of(brought))
        n_elements = sum(buffer.numel() for buffer in brought)
        buffers = f", {len(brought)} buffers of {n_elements} elements" if brought else ""
        self._call.name += f" ({asked}; {len(shapes)} parameters{buffers})"
        if parts.n_samples and not self._per_rank:
            self._weight = weight_of(parts)

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
        loss = LossOfAll(parts, outcome)
        tally = self._vote(loss, exchange, weight)
        self.n_samples = tally.n_samples
        share = self._share(weight, tally)
        self._scale_own(share)
        if tally.n_with_data:
            exchange.run(share, tally)
        else:
            for leaf, _ in parts.gradients.new():
                leaf.grad = None
        for replica in self._replicas:
            replica.module.require_forward_param_sync = replica.exchanges
        if self._per_rank:
            return loss.own
        return loss.of_all(tally, is_sum=self._adds_up)

    def _parameters(self) -> list[Tensor]:
        """Return the parameters whose gradients are exchanged, in one order on all ranks."""
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
        """Return the parameters of replicas in ``no_sync()``, which exchange them later."""
        return [
            parameter
            for replica in self._replicas
            if not replica.exchanges
            for parameter in replica.module.parameters()
        ]

    def _vote(self, loss: LossOfAll, exchange: Exchange, weight: float) -> Ballot:
        names: list[str] = []
        values: list[float] = []
        n_samples = self._parts.n_samples
        if not self._per_rank:
            names = [*loss.own.terms, "counts", *self._parts.counts]
            values = loss.times(1.0 if self._adds_up else weight, n_samples)
        # nothing may fail from here on: see Note [Votes], rule 2
        tally = self._call.vote(
            Ballot(
                self._mark,
                n_with_data=int(n_samples > 0),
                n_samples=n_samples,
                weight=weight,
                n_missing=exchange.n_missing,
                size=mark_of(*names),
                shapes=exchange.mark_of_buffers,
                # the first that has samples
                least=self._call.group.rank if n_samples else sys.maxsize,
                values=values,
            )
        )
        refuse_other_terms(tally)
        # collectives of other lengths may end the process
        if not tally.is_one_shape:
            raise AdaptiveUsageError(
                "step() has left a replica with buffers of other shapes on one rank than on "
                "another. Nothing was delivered. Let the shapes of buffers not depend on samples."
            )
        return tally

    def _brought(self) -> list[Replicated]:
        """Return the replicas whose buffers become those of one rank."""
        return [each.module for each in self._replicas if each.brings_buffers]

    def _own_weight(self, outcome: StepOutcome | None) -> float:
        """Return the divisor of the mean over this rank's samples."""
        parts = self._parts
        if outcome is None:
            return 0.0
        if self._per_rank or self._adds_up:
            return 1.0
        if len(outcome.terms) > 1 and parts.counts:
            raise AdaptiveUsageError(
                "The function of step() returned several terms, and a count with "
                f"{', '.join(map(repr, parts.counts))}: on several ranks each would have another "
                "weight. Nothing was changed. Return means over one number, and give that as "
                "weight=; or pass per_rank=True."
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
        return self._weight

    def _share(self, weight: float, tally: Ballot) -> float:
        """Return the factor of this rank's gradients before they are summed."""
        if self._per_rank:
            return 1 / self._call.group.size
        if self._adds_up or not tally.n_with_data:
            return 1.0
        return share_of(weight, self._parts.n_samples, tally)

    def _scale_own(self, share: float) -> None:
        """Multiply the gradients that are not exchanged, or only some time later."""
        share *= self._call.group.size
        exchanged, waiting = ({id(p) for p in each} for each in (self._exchanged, self._waiting()))
        is_own = self._per_rank or self._adds_up
        with torch.no_grad(), without_functions():
            for leaf, gradient in self._parts.gradients.new():
                # of what is averaged over ranks later the average has to be that of the whole
                if id(leaf) in waiting or not (is_own or id(leaf) in exchanged):
                    multiply(gradient, share)

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
