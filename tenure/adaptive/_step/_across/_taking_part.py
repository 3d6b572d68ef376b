"""The ranks that take part in a step: of its replicas, or of a group that is named.

Invariant: a rank that belongs to a group votes, whatever becomes of its call; what can't be done
by several ranks is refused before anything runs, on all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from tenure._errors import AdaptiveUsageError
from tenure._torch.replicas import rebuild_buckets
from tenure._torch.sharding import Shards

from ..._callables import short_name_of
from ..._interrupts import Interrupts
from ..._ranks import (
    RankCall,
    RankGroup,
    Replicated,
    has_other_replicas,
    is_first_fsdp,
    is_sharded,
    rank_group,
    without_collectives,
)
from ..._reachable import Reachable, modules_given
from ..._undo import modules_below
from .._arguments import StepSpec
from ._planned import PlannedRanks, refuse_group
from ._step_ranks import StepRanks

_AS_BEFORE = "Nothing was delivered on any rank: gradients, buffers and random state are as before."
_AFTERWARDS = (
    "Call it before step(), with the batch, or after, with what the function returned beside its "
    "loss: has_aux=True"
)


@contextmanager
def taking_part(
    spec: StepSpec, group: Any, *, per_rank: bool
) -> Iterator[StepRanks | PlannedRanks | None]:
    """Return a block in which ranks make a step together; asked where there are other processes.

    Args:
        spec: the step.
        group: the process group that was named, or None.
        per_rank: whether the loss is each rank's own.

    Returns:
        What the step has to do with the others; None where there are none.
    """
    name = f"{spec.entry}({short_name_of(spec.fn)!r})"
    with Interrupts() as interrupts:
        found = _found_by(spec)
        ranks, sharding = _ranks_of(spec.entry, group, found)
        if ranks is None:
            interrupts.end()
            if found.wrong is not None:
                raise found.wrong
            yield None
            return
        with RankCall(ranks, name, interrupts, _AS_BEFORE) as call:
            if found.wrong is not None:
                raise found.wrong
            takes_all = group is not None
            if sharding is None:
                _prepare(spec.entry, found, ranks.group, takes_all=takes_all)
            if not per_rank:
                _refuse_functions_of_a_batch(spec)
            if sharding is not None:
                yield PlannedRanks(call, spec, sharding, per_rank=per_rank)
                return
            with without_collectives(spec.entry, short_name_of(spec.fn), _AFTERWARDS):
                yield StepRanks(call, spec, found.shared, per_rank=per_rank, takes_all=takes_all)


class _Found(NamedTuple):
    """The modules that a step is known to run.

    Attributes:
        modules: all modules.
        shared: those of them that are replicas, of which other ranks have others.
        wrong: the error where ``model=`` is no module.
        unordered: sets in which they are, by name.
    """

    modules: list[nn.Module]
    shared: list[Replicated]
    wrong: AdaptiveUsageError | None
    unordered: list[str]


def _found_by(spec: StepSpec) -> _Found:
    functions = spec.fn, spec.loss, spec.then, spec.once
    found = Reachable(*(function for function in functions if callable(function)))
    given, wrong = {}, None
    try:
        given = {} if spec.model is None else modules_given(spec.entry, spec.model)
    # other ranks are to be told first, and it is the function that leads to them
    except AdaptiveUsageError as error:
        wrong = error
    named = ["model="] if len(given) > 1 and isinstance(spec.model, set | frozenset) else []
    modules = modules_below([*given.values(), *found.modules.values()])
    shared = [each for each in modules if has_other_replicas(each)]
    return _Found(modules, shared, wrong, found.unordered + named)


def _ranks_of(entry: str, group: Any, found: _Found) -> tuple[RankGroup | None, Shards | None]:
    """Return the ranks of the step, if there are several, and the shards, if there are any."""
    modules, shared = found.modules, found.shared
    sharding = Shards(modules)
    if sharding.n_ranks > 1 and not shared and not any(map(is_first_fsdp, modules)):
        named: Any = torch.distributed.group.WORLD if group is None else group
        refuse_group(entry, named, sharding)
        # or gradients would be those of parameters that are whole, which nobody trains
        sharding.reshard()
        return rank_group(entry, named), sharding
    named = group if group is not None or not shared else shared[0].process_group
    return None if named is None else rank_group(entry, named), None


def _prepare(entry: str, found: _Found, group: Any, *, takes_all: bool) -> None:
    """Make replicas ready for a step; refuse modules with which ranks can't make one together."""
    if found.unordered and (takes_all or len(found.shared) > 1):
        raise AdaptiveUsageError(
            f"{entry}() found modules or tensors in a set, {found.unordered[0]}, whose order is "
            "another in each process, so that ranks would add up gradients of different "
            "parameters. Nothing was changed. Keep them in a list or a dict."
        )
    # all ranks talk here, which they would in a forward pass that not all may come to
    if torch.is_grad_enabled():
        for replica in found.shared:
            rebuild_buckets(replica)
    _refuse_modules(entry, found.modules, found.shared, group)


def _refuse_modules(
    entry: str, modules: Iterable[nn.Module], shared: list[Replicated], group: Any
) -> None:
    for replica in shared:
        if replica.process_group is not group:
            raise AdaptiveUsageError(
                f"{entry}() got a DistributedDataParallel of {type(replica.module).__name__} whose "
                "process group is not that of the step, by group= or by another module. Nothing "
                "was changed. Make all with one process_group=, and call step() for each group."
            )
    for module in modules:
        if isinstance(module, nn.SyncBatchNorm) and module.training:
            raise AdaptiveUsageError(
                f"{entry}() got a SyncBatchNorm in training, whose forward pass waits for all "
                "ranks; one that runs out of memory would leave the others waiting. Nothing was "
                "changed. Freeze it with eval(), or use BatchNorm, LayerNorm or GroupNorm."
            )
        if is_sharded(module):
            raise AdaptiveUsageError(
                f"{entry}() got a {type(module).__name__} beside ranks that make a step together: "
                "its passes wait for all ranks, and one that runs out of memory would leave the "
                "others waiting. Nothing was changed. Leave group= out, or use "
                "DistributedDataParallel."
            )


def _refuse_functions_of_a_batch(spec: StepSpec) -> None:
    name = "then=" if spec.then is not None else "loss=" if callable(spec.loss) else None
    if name is not None:
        raise AdaptiveUsageError(
            f"{spec.entry}() got {name} a function, which has the batch of one rank and not that "
            "of all, so that its gradients are not those of the whole. Nothing was changed. Say "
            "the loss as a mean or a sum; or pass per_rank=True, where each rank has a loss of its "
            "own and gradients are averaged."
        )
