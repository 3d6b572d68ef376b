"""A group of ranks, and all that they say to each other.

Invariant: every collective goes through a `RankGroup`, which gives any failure of one the same
error: a rank has died, or did not come. What ranks say goes over connections of its
own, so that it never meets a collective of the user's, or of a module, that another rank is in.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from contextlib import suppress
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


class RankGroup:
    """The ranks of a process group, kept from call to call.

    Args:
        group: a process group of torch that this process belongs to.

    Attributes:
        size: how many ranks there are.
        rank: which of them this process is, from 0.
        patience_s: how long a vote waits for the others; None: as long as their group.
    """

    def __init__(self, group: Any) -> None:
        distributed: Any = torch.distributed
        # one that was destroyed has to end
        self._group = weakref.ref(group)
        self.size: int = distributed.get_world_size(group)
        self.rank: int = distributed.get_rank(group)
        self.patience_s: float | None = None
        # a group of the same ranks for what they say; None once one of them was lost
        self._votes: Any = None
        self._members: tuple[Member, ...] = ()
        # where ranks say that they have lost one
        self._store: Any = None
        self._n_connected = 0
        # a rank that has ended will never come again
        self._has_ended = False

    @property
    def group(self) -> Any:
        """The process group."""
        return self._group()

    def connect(self, entry: str) -> None:
        """Connect to the other ranks, which do so, too, unless all are connected.

        By hand and not by ``new_group``, to which all processes of the program would have to come,
        also those that are in no step of this group.

        Args:
            entry: what errors call the call.

        Raises:
            AdaptiveUsageError: torch was built without gloo.
            RemoteRankError: another rank did not come.
        """
        distributed: Any = torch.distributed
        # a rank that was late comes here, too, once it has seen that others did not wait
        if self._votes is not None or self._has_ended:
            return
        if not distributed.is_gloo_available():
            raise AdaptiveUsageError(
                f"{entry}() has to ask other ranks, which it does through gloo, and torch "
                f"{torch.__version__} was built without. Install one that has it."
            )
        try:
            # each group has a part of the store to itself, and what is made anew one of its own
            name, store = f"tenure {self._n_connected}", self.group.get_group_store()
            self._store = distributed.PrefixStore(name, store)
            self._store.set(f"member {self.rank}", own_member())
            self._votes = distributed.ProcessGroupGloo(
                self._store, self.rank, self.size, timeout_of(self.group)
            )
            told = self._store.multi_get([f"member {each}" for each in range(self.size)])
            self._members = tuple(map(member_of, told))
            self._n_connected += 1
        except Exception as error:
            raise lost_rank_error(error, self.size) from error

    def sum(self, tensor: Tensor) -> None:
        """Replace a tensor by the sum of those of all ranks, in place."""
        self._run(torch.distributed.all_reduce, tensor, group=self.group)

    def copy_from(self, rank: int, tensor: Tensor) -> None:
        """Replace a tensor by that of one rank, in place."""
        self._run(torch.distributed.broadcast, tensor, group=self.group, group_src=rank)

    def vote(self, tensor: Tensor, of_two: Callable[[Tensor, Tensor], Tensor] = torch.add) -> None:
        """Replace a tensor of the CPU by the sum, or another result, of those of all ranks."""
        # with patience it is the last that is said: who has not come by then can't be reached
        patience = None if self.patience_s is None else timedelta(seconds=self.patience_s)
        self._run(lambda: combine(self._connected(), tensor, of_two, patience))

    def gather(self, value: object) -> list[Any]:
        """Gather a JSON value of each rank; for rare messages."""
        told = json.dumps(value).encode()
        lengths = self._gathered(torch.tensor([len(told)], dtype=torch.int64, device="cpu"))
        longest = max(int(each) for each in lengths)
        texts = self._gathered(
            torch.tensor([*told.ljust(longest)], dtype=torch.uint8, device="cpu")
        )
        return [json.loads(bytes(each.tolist())) for each in texts]

    def _gathered(self, tensor: Tensor) -> list[Tensor]:
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        self._run(lambda: self._connected().allgather([found], [tensor]).wait())
        return found

    def _connected(self) -> Any:
        if self._votes is None:
            raise RuntimeError("a rank was lost in a call before")
        return self._votes

    def _run(self, collective: Callable[..., object], *args: Any, **how: Any) -> None:
        try:
            # no scope owns, and no budget counts, what a collective takes for itself
            with aside(), told_of_collectives(None):
                collective(*args, **how)
        except Exception as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> RemoteRankError:
        # before the next line: others are told by that, and then read this
        with suppress(Exception):
            self._store.set(f"has lost one {self.rank}", "")
        # it closes the connections of this rank: who waits in a vote for one that has seen the
        # loss, and not for the one that is lost, would wait until this process ends
        self._votes = None
        ended = ended_ranks(self._members)
        self._has_ended = self._has_ended or bool(ended)
        if len(ended) > 1:
            # those that ended first, not because another had; the store may have gone with its rank
            with suppress(Exception):
                check = self._store.check
                first = {r: name for r, name in ended.items() if not check([f"has lost one {r}"])}
                ended = first or ended
        return lost_rank_error(error, self.size, ended)


_known: weakref.WeakKeyDictionary[Any, RankGroup] = weakref.WeakKeyDictionary()


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
    ranks = _known.get(group)
    if ranks is None:
        ranks = _known[group] = RankGroup(group)
    # a call before may have failed
    ranks.patience_s = None
    ranks.connect(entry)
    return ranks
