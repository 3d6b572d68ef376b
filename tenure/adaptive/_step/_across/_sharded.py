"""What a step of sharded modules can't do, and what reaches shards of parameters directly.

Invariant: all is told by what is the same on all ranks that share parameters, so that none of them
waits for one that was refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tenure._errors import AdaptiveUsageError
from tenure._text import describe_tensor, listed
from tenure._torch.sharding import Shards, is_dtensor

from .._split import StepParts


class ShardGradients:
    """Gradients that reach shards of parameters directly, and which nothing averages over ranks.

    A penalty on ``model.parameters()`` is one. What all modules give is multiplied by the factor of
    this rank, because its share comes about when it is averaged; a shard has its gradient as it is.

    Args:
        shards: the modules.
        factor: of this rank; None where terms have several, or one that can't be divided by.
        of_once: that of what is added once.

    Attributes:
        has_unknown: whether there was one that can't be brought to its scale.
    """

    def __init__(self, shards: Shards, factor: float | None, of_once: float) -> None:
        self._shards = shards
        self._factor = factor
        self._of_once = of_once
        self.has_unknown = False

    def of_chunk(self) -> AbstractContextManager[None]:
        """A block in which a micro-batch runs backward."""
        return self._divided(self._factor)

    @contextmanager
    def of_what_is_added_once(self) -> Iterator[None]:
        """A block in which what is added once runs."""
        # gradients of parameters that are whole would wait for the end of a pass of their modules
        self._shards.reshard()
        with self._divided(self._of_once):
            yield

    @contextmanager
    def _divided(self, factor: float | None) -> Iterator[None]:
        def divide(gradient: Tensor) -> Tensor | None:
            if factor is None:
                self.has_unknown = True
                return None
            return gradient / factor

        trained = [shard for shard in self._shards.shards() if shard.requires_grad]
        # autograd runs them, and not who brings a gradient that was averaged
        handles = [] if factor == 1 else [shard.register_hook(divide) for shard in trained]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


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


def refuse_settings(entry: str, shards: Shards, *, per_rank: bool) -> None:
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


def refuse_late(entry: str, parts: StepParts, shards: Shards, direct: ShardGradients) -> None:
    """Make sure that all gradients that are there are those of all ranks.

    Raises:
        AdaptiveUsageError: one is not.
    """
    if direct.has_unknown:
        raise AdaptiveUsageError(
            f"The loss of {entry}() depends on shards of parameters directly, as by a penalty on "
            "model.parameters(). Nothing averages that over ranks, and here it is added to a sum, "
            "or to terms that weigh differently or nothing on this rank, so that it can't be "
            "brought to their scale. Nothing was delivered. Return it by once=, which is added "
            "once."
        )
    # ranks that are parallel over tensors have the same samples, and so the same gradients
    if shards.n_averaged == 1:
        return
    for leaf, _ in parts.gradients.new():
        if isinstance(leaf, nn.Parameter) and not is_dtensor(leaf):
            name = parts.leaf_names.get(id(leaf)) or _name_of(leaf, parts)
            raise AdaptiveUsageError(
                f"{entry}() has trained {name}, {describe_tensor(leaf)}, which is not sharded, "
                "beside modules of fully_shard: nobody brings its gradient to other ranks, where "
                "it would become another. Nothing was delivered. Call fully_shard() on the root "
                "of the model, too, after its layers; freeze it; or pass per_rank=True, and "
                "average its gradient yourself."
            )


def _name_of(leaf: Tensor, parts: StepParts) -> str:
    names = (n for root in parts.roots.values() for n, p in root.named_parameters() if p is leaf)
    return next((f"the parameter {name!r}" for name in names), "a parameter")


def _ranks(members: Any) -> str:
    return f"ranks {listed([*map(str, sorted(members))], most=8)}"
