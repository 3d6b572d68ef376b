"""A group of ranks, and all that they say to each other.

Invariant: every collective goes through a `RankGroup`, which counts it, and gives any failure of
one the same error: a rank has died, or did not come. What ranks say goes over connections of its
own, so that it never meets a collective of the user's, or of a module, that another rank is in.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from tenure._errors import AdaptiveUsageError, RemoteRankError
from tenure._torch.quiet import aside
from tenure._torch.replicas import timeout_of, told_of_collectives

from ._doubling import combine
from ._errors import lost_rank_error
from ._members import Member, ended_ranks, member_of, own_member


def is_rank() -> bool:
    """Return whether this process is a rank, even of a program with one process."""
    distributed: Any = torch.distributed
    return bool(distributed.is_available() and distributed.is_initialized())


def has_other_ranks() -> bool:
    """Return whether other processes take part; alone, a process waits for nobody."""
    return is_rank() and bool(torch.distributed.get_world_size() > 1)


@dataclass(slots=True)
class Traffic:
    """What is kept of a process group from call to call.

    Attributes:
        votes: a group of the same ranks for what they say; None once one of them was lost.
        members: the process of each rank.
        store: where ranks say that they have lost one.
        n_made: how many groups were made for votes.
        has_ended: whether a rank has ended, and will never come again.
        n_collectives: how many collectives were begun.
        n_bytes: the bytes of their tensors on this rank.
    """

    votes: Any = None
    members: tuple[Member, ...] = ()
    store: Any = None
    n_made: int = 0
    has_ended: bool = False
    n_collectives: int = 0
    n_bytes: int = 0


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

    def vote(self, tensor: Tensor, of_two: Callable[[Tensor, Tensor], Tensor] = torch.add) -> None:
        """Replace a tensor of the CPU by the sum, or another result, of those of all ranks."""
        self._run(tensor.nbytes, self._vote, tensor, of_two)

    def smallest(self, numbers: Sequence[int]) -> list[int]:
        """Return the smallest of each of some numbers that all ranks have."""
        vector = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        self.vote(vector, torch.minimum)
        return [int(number) for number in vector.tolist()]

    def gather(self, value: object) -> list[Any]:
        """Gather a JSON value of each rank; for rare messages."""
        told = json.dumps(value).encode()
        lengths = self._gathered(torch.tensor([len(told)], dtype=torch.int64, device="cpu"))
        longest = max(int(each) for each in lengths)
        texts = self._gathered(
            torch.tensor([*told.ljust(longest)], dtype=torch.uint8, device="cpu")
        )
        return [json.loads(bytes(each.tolist())) for each in texts]

    def _vote(self, tensor: Tensor, of_two: Callable[[Tensor, Tensor], Tensor]) -> None:
        # with patience it is the last that is said: who has not come by then can't be reached
        patience = None if self.patience_s is None else timedelta(seconds=self.patience_s)
        combine(self._votes(), tensor, of_two, patience)

    def _gathered(self, tensor: Tensor) -> list[Tensor]:
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        self._run(tensor.nbytes, lambda: self._votes().allgather([found], [tensor]).wait())
        return found

    def _votes(self) -> Any:
        if self.traffic.votes is None:
            raise RuntimeError("a rank was lost in a call before")
        return self.traffic.votes

    def _run(self, n_bytes: int, collective: Callable[..., object], *args: Any, **how: Any) -> None:
        self.traffic.n_collectives += 1
        self.traffic.n_bytes += n_bytes
        try:
            # no scope owns, and no budget counts, what a collective takes for itself
            with aside(), told_of_collectives(None):
                collective(*args, **how)
        except Exception as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> RemoteRankError:
        traffic = self.traffic
        # before the next line: others are told by that, and then read this
        with suppress(Exception):
            traffic.store.set(f"has lost one {self.rank}", "")
        # it closes the connections of this rank: who waits in a vote for one that has seen the
        # loss, and not for the one that is lost, would wait until this process ends
        traffic.votes = None
        ended = ended_ranks(traffic.members)
        if len(ended) > 1:
            ended = self._lost_first(ended)
        traffic.has_ended = traffic.has_ended or bool(ended)
        return lost_rank_error(error, self.size, ended)

    def _lost_first(self, ended: dict[int, str]) -> dict[int, str]:
        """Return the ranks that ended first, not because another had."""
        # the store may have gone with the rank that had it
        with suppress(Exception):
            check = self.traffic.store.check
            first = {r: name for r, name in ended.items() if not check([f"has lost one {r}"])}
            return first or ended
        return ended


# Weakly, and nothing there holds the group: one that was destroyed has to end.
_known: weakref.WeakKeyDictionary[Any, Traffic] = weakref.WeakKeyDictionary()


def rank_group(entry: str, group: Any) -> RankGroup | None:
    """Return the ranks of a process group; None where this process is alone in it.

    The first time for a group all its ranks have to come, and connect to each other.

    Args:
        entry: what errors call the call.
        group: a process group.

    Raises:
        AdaptiveUsageError: this process is no member of it.
        RemoteRankError: another did not come.
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
    traffic = _known.setdefault(group, Traffic())
    # a rank that was late comes here, too, once it has seen that others did not wait
    if traffic.votes is None and not traffic.has_ended:
        if not distributed.is_gloo_available():
            raise AdaptiveUsageError(
                f"{entry}() has to ask other ranks, which it does through gloo, and torch "
                f"{torch.__version__} was built without. Install one that has it."
            )
        try:
            _connect(group, traffic)
        except Exception as error:
            n_ranks = distributed.get_world_size(group)
            raise lost_rank_error(error, n_ranks) from error
    return RankGroup(group, traffic)


def _connect(group: Any, traffic: Traffic) -> None:
    """Connect to the other ranks, which do so, too.

    By hand and not by ``new_group``, to which all processes of the program would have to come,
    also those that are in no step of this group.
    """
    distributed: Any = torch.distributed
    rank, n_ranks = distributed.get_rank(group), distributed.get_world_size(group)
    # each group has a part of the store to itself, and what is made anew one of its own
    store = distributed.PrefixStore(f"tenure {traffic.n_made}", group.get_group_store())
    store.set(f"member {rank}", own_member())
    traffic.votes = distributed.ProcessGroupGloo(store, rank, n_ranks, timeout_of(group))
    told = store.multi_get([f"member {each}" for each in range(n_ranks)])
    traffic.members, traffic.store = tuple(map(member_of, told)), store
    traffic.n_made += 1
