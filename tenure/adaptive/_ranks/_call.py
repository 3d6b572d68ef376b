"""A call that all ranks of a group make: whatever happens in it, this rank votes.

Invariant: a call that ends has voted, or its vote has failed. Ctrl-C waits until the call can vote,
and from its vote on for its end, so that no rank waits for one that was interrupted in between.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from torch import nn

from tenure._errors import AdaptiveUsageError, RemoteRankError
from tenure._torch.compiler import never_compiled
from tenure._torch.modules import modules_told
from tenure._torch.replicas import told_of_collectives

from .._callables import told_apart
from .._interrupts import Interrupts
from ._errors import elsewhere_error, failed_rank_error, failure_of
from ._group import RankGroup, has_other_ranks, rank_group
from ._modules import has_other_replicas, is_sharded
from ._vote import Ballot, mark_of, tally

_NO_RESULT = "No rank gets a result."


class RankCall:
    """A block that votes.

    Args:
        group: the ranks.
        name: what errors call the call.
        after: what holds where it has failed.
        interrupts: keeps Ctrl-C since before the group was known; lets it through from when the
            call begins until it votes.
        mark: what has to be the same on all ranks besides the name, for `smallest`.

    Attributes:
        group: the ranks.
        name: what errors call the call; may be set to say more of it.
        has_voted: whether the others know how the call went here.
    """

    def __init__(
        self,
        group: RankGroup,
        name: str,
        interrupts: Interrupts,
        after: str = _NO_RESULT,
        *,
        mark: str = "",
    ) -> None:
        self.group = group
        self._interrupts = interrupts
        self._after = after
        self._mark = mark
        self.name = name
        self.has_voted = False

    def __enter__(self) -> Self:
        try:
            self._interrupts.end()
        # a block whose entry fails is not left
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            # See Note [Votes], rule 1.
            if error is not None and not self.has_voted:
                self._vote_failed(error)
        finally:
            self._interrupts.end()

    def vote(self, ballot: Ballot) -> Ballot:
        """Say how the call went here, and hear of the others.

        Raises:
            RemoteRankError: the call has failed on another rank, or one has died.
            AdaptiveUsageError: ranks are in different calls.
        """
        self._interrupts.keep()
        self.has_voted = True
        found = tally(self.group, ballot)
        if found.n_failed:
            raise failed_rank_error(self.name, self.group.gather(None), self._after)
        if not found.is_one_call:
            raise elsewhere_error(self.group.gather(self.name), self._after)
        return found

    def smallest(self, size: int) -> int:
        """Vote with a size, and return the smallest of all ranks.

        Raises:
            RemoteRankError: the call has failed on another rank, or one has died.
            AdaptiveUsageError: ranks are in different calls.
        """
        # no batch is larger; a number of more bits can't be sent
        size = min(size, sys.maxsize)
        return self.vote(Ballot(mark_of(self.name, self._mark), n_with_data=1, size=size)).size

    def go_on(self) -> None:
        """Work on after a vote: another one will follow."""
        self.has_voted = False
        self._interrupts.end()

    def _vote_failed(self, error: BaseException) -> None:
        # before the vote: from then on the others wait for it
        failure = failure_of(error)
        self._interrupts.keep()
        self.has_voted = True
        try:
            tally(self.group, Ballot(n_failed=1))
            self.group.gather(failure)
        # that of the work says what matters
        except RemoteRankError as lost:
            error.add_note(f"The other ranks could not be told of it: {lost}")


@contextmanager
def call_of_ranks(entry: str, name: str, function: Any, group: Any) -> Iterator[RankCall | None]:
    """Return a block whose work is each rank's own, and that votes with `RankCall.smallest`.

    Args:
        entry: what the entry point is called.
        name: what errors call the function that it runs.
        function: that function, which has to be the same on all ranks.
        group: the process group that was named, or None.

    Returns:
        The call; None where there are no other ranks to vote with.
    """
    if group is None or not has_other_ranks():
        yield None
        return

    @never_compiled
    def refuse(module: nn.Module, values: object) -> None:
        if has_other_replicas(module) or is_sharded(module):
            raise AdaptiveUsageError(
                f"{name!r}, run by {entry}() with group=, runs a {type(module).__name__}, which "
                "waits for other ranks when it runs: one that runs out of memory would leave the "
                "others waiting. Run what it wraps, such as the .module of a "
                "DistributedDataParallel; for a training step use step()."
            )

    with Interrupts() as interrupts:
        ranks = rank_group(entry, group)
        if ranks is None:
            interrupts.end()
            yield None
            return
        with (
            RankCall(ranks, f"{entry}({name!r})", interrupts, mark=told_apart(function)) as call,
            modules_told(refuse),
            without_collectives(entry, name, "Call it after, with what the function returned"),
        ):
            yield call


@contextmanager
def without_collectives(entry: str, name: str, instead: str) -> Iterator[None]:
    """Return a block in which a collective of this thread raises before it begins.

    Ranks run a function as often as the memory of each wants. One that retries would meet the next
    collective of the others, whatever that is: gloo ends the process, or adds up what has nothing
    to do with each other.

    Args:
        entry: what the entry point is called.
        name: the function that it runs.
        instead: what to do, as a sentence without its full stop.

    Raises:
        AdaptiveUsageError: in the block, from the collective.
    """

    def refuse(collective: str) -> None:
        raise AdaptiveUsageError(
            f"{name!r}, run by {entry}() on several ranks, called torch.distributed.{collective}"
            "(): each rank runs it as often as its own memory wants, so that one would wait for "
            f"the others, or meet another collective of theirs. Nothing was sent. {instead}."
        )

    with told_of_collectives(refuse):
        yield
