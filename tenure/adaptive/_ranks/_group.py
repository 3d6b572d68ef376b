"""A group of ranks, and all that they say to each other.

Invariant: every collective goes through a `RankGroup`, which counts it, and gives any failure of
one the same error: a rank has died, or did not come.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from tenure._errors import AdaptiveUsageError
from tenure._torch.exchange import has_backend_for, timeout_of
from tenure._torch.quiet import aside

from ._errors import lost_rank_error

_CPU = torch.device("cpu")


def is_rank() -> bool:
    """Whether this process is one of a program for several, of which there may be one alone."""
    distributed: Any = torch.distributed
    return bool(distributed.is_available() and distributed.is_initialized())


def has_other_ranks() -> bool:
    """Whether other processes take part; alone, a process waits for nobody."""
    return is_rank() and bool(torch.distributed.get_world_size() > 1)


@dataclass(slots=True)
class Traffic:
    """What is kept of a process group from call to call.

    Attributes:
        votes: another group of the same ranks, for tensors of the CPU; None where the group itself
            takes them.
        n_collectives: how many collectives were begun.
        n_bytes: the bytes of their tensors on this rank.
        is_broken: whether a collective has failed, after which none works.
    """

    votes: Any
    n_collectives: int = 0
    n_bytes: int = 0
    is_broken: bool = False


class RankGroup:
    """The ranks of a process group.

    Args:
        group: a process group of torch that this process belongs to.
        traffic: what is kept of it.

    Attributes:
        group: the process group.
        traffic: what is kept of it.
        size: how many ranks there are.
        rank: which of them this process is, from 0.
        patience_s: how long a vote waits for the others; None: as long as their group.
    """

    def __init__(self, group: Any, traffic: Traffic) -> None:
        distributed: Any = torch.distributed
        self.group = group
        self.traffic = traffic
        self.size: int = distributed.get_world_size(group)
        self.rank: int = distributed.get_rank(group)
        self._votes = group if traffic.votes is None else traffic.votes
        self.patience_s: float | None = None

    def sum(self, tensor: Tensor) -> None:
        """Replace a tensor by the sum of those of all ranks, in place."""
        distributed: Any = torch.distributed
        self._run(tensor.nbytes, distributed.all_reduce, tensor, group=self.group)

    def copy_from(self, rank: int, tensor: Tensor) -> None:
        """Replace a tensor by that of one rank, in place."""
        distributed: Any = torch.distributed
        self._run(
            tensor.nbytes, distributed.broadcast, tensor, group=self.group, group_src=rank
        )  # fmt: skip

    def vote(self, tensor: Tensor, *, smallest: bool = False) -> None:
        """Replace a tensor of the CPU by the sum, or the smallest, of those of all ranks."""
        distributed: Any = torch.distributed
        ops = distributed.ReduceOp
        op = ops.MIN if smallest else ops.SUM
        if self.patience_s is not None:
            options = distributed.AllreduceOptions()
            options.reduceOp, options.timeout = op, timedelta(seconds=self.patience_s)
            # the last that is said: who has not come by then can't be reached
            self._run(tensor.nbytes, lambda: self._votes.allreduce([tensor], options).wait())
            return
        self._run(tensor.nbytes, distributed.all_reduce, tensor, op=op, group=self._votes)

    def smallest(self, numbers: Sequence[int]) -> list[int]:
        """The smallest of each of some numbers that all ranks have."""
        vector = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        self.vote(vector, smallest=True)
        return [int(number) for number in vector.tolist()]

    def gather(self, value: object) -> list[Any]:
        """What each rank has; objects that can be pickled, for what is seldom said."""
        distributed: Any = torch.distributed
        found: list[Any] = [None] * self.size
        self._run(0, distributed.all_gather_object, found, value, group=self._votes)
        return found

    def _run(self, n_bytes: int, collective: Callable[..., object], *args: Any, **how: Any) -> None:
        self.traffic.n_collectives += 1
        self.traffic.n_bytes += n_bytes
        try:
            # no scope owns, and no budget counts, what a collective takes for itself
            with aside():
                collective(*args, **how)
        except Exception as error:
            self.traffic.is_broken = True
            raise lost_rank_error(error, self.size) from error


# Weakly, and nothing there holds the group: one that was destroyed has to end.
_known: weakref.WeakKeyDictionary[Any, dict[bool, Traffic]] = weakref.WeakKeyDictionary()


def rank_group(entry: str, group: Any, *, is_apart: bool = False) -> RankGroup | None:
    """The ranks of a process group; None where this process is alone in it.

    The first time for a group all its ranks have to come: those that vote need a backend for the
    memory of the host, so that voting takes none of the device.

    Args:
        entry: what errors call the call.
        group: a process group.
        is_apart: whether ranks vote on a group of its own, as others may be in collectives.

    Raises:
        AdaptiveUsageError: this process is no member of it.
    """
    distributed: Any = torch.distributed
    # first: what torch gives who is no member is a number, which nothing can hold weakly
    if distributed.get_rank(group) < 0:
        raise AdaptiveUsageError(
            f"{entry}() got a group= that this process, rank {distributed.get_rank()} of all, is "
            "no member of. Pass one that it is in, or call it on the members alone."
        )
    if distributed.get_world_size(group) < 2:
        return None
    known = _known.setdefault(group, {})
    # one of votes alone is made anew: it fails for all ranks or for none, so all come here, see
    # test_ranks_that_ran_out_at_other_times_go_on
    if is_apart not in known or (is_apart and known[is_apart].is_broken):
        known[is_apart] = Traffic(_votes_of(group, is_apart=is_apart))
    return RankGroup(group, known[is_apart])


def _votes_of(group: Any, *, is_apart: bool) -> Any:
    """Another group of the same ranks, for tensors of the CPU; None where it takes them itself."""
    distributed: Any = torch.distributed
    if has_backend_for(group, _CPU) and not is_apart:
        return None
    # of some ranks alone none is made: by use_local_synchronization torch names it by how many
    # groups each rank is in, and ranks that are in different numbers of them wait for ever
    if group is not distributed.group.WORLD or not distributed.is_gloo_available():
        raise AdaptiveUsageError(
            "Ranks vote in memory of the host, and their process group has no backend for that. "
            'Name one for it: init_process_group("cpu:gloo,cuda:nccl"), or the same backend= in '
            "new_group()."
        )
    try:
        return distributed.new_group(backend="gloo", timeout=timeout_of(group))
    except Exception as error:
        raise lost_rank_error(error, distributed.get_world_size(group)) from error
