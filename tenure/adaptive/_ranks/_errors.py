"""Errors of ranks that don't agree: one has failed, is lost, or is in a different call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tenure._errors import AdaptiveUsageError, RemoteRankError
from tenure._text import listed

_MOST_CHARACTERS = 400
Failure = tuple[str, str]
"""The kind of an error, and its text."""


def failure_of(error: BaseException) -> Failure:
    """Return the description of an error for other ranks."""
    try:
        text = str(error)
    # of a class of the user's, and the others wait to be told
    except Exception:
        text = "its text can't be had"
    if len(text) > _MOST_CHARACTERS:
        text = f"{text[:_MOST_CHARACTERS]} ..."
    kind = type(error)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{module}{kind.__qualname__}", text


def failed_rank_error(name: str, failures: Sequence[Failure | None], after: str) -> RemoteRankError:
    """Return the error on ranks that did well, where others did not.

    Args:
        name: what the call is.
        failures: what each rank says of itself.
        after: what holds now.
    """
    failed = {rank: each for rank, each in enumerate(failures) if each is not None}
    told = [f"rank {rank} ({': '.join(filter(None, each))})" for rank, each in failed.items()]
    rank, first = next(iter(failed.items()), (None, ("", "")))
    return RemoteRankError(
        f"{name} failed on {listed(told, most=4)} of {len(failures)} ranks, and not on this one. "
        f"{after} Mend what failed there. To go on without this call, catch that error there and "
        "this one here.",
        rank,
        ": ".join(filter(None, first)),
    )


def lost_rank_error(
    error: Exception, n_ranks: int, ended: Mapping[int, str] | None = None
) -> RemoteRankError:
    """Return the error where ranks can't talk any more.

    Args:
        error: that of the group.
        n_ranks: how many there are.
        ended: the ranks that are known to have ended, in words.
    """
    reason = str(error).strip().partition("\n")[0]
    told = f"{type(error).__name__}: {reason}"
    ended = ended or {}
    if ended:
        has, it = ("has", "it") if len(ended) == 1 else ("have", "them")
        names = listed([*ended.values()], most=4)
        what = (
            f"Of {n_ranks} ranks {names} {has} ended while others wait for {it} ({told}). The call "
            "gives this rank nothing, and the group can't be used any more."
        )
    else:
        what = (
            f"One of {n_ranks} ranks has died, has raised an error, or did not come in time to the "
            f"call of tenure.adaptive that the others are in ({told}). The call gives this rank "
            "nothing. With sharded modules, let all processes end; without, the next call connects "
            "all again, if all are still there."
        )
    return RemoteRankError(
        f"{what} Look for the first error among all ranks, and let every rank make the same calls; "
        "a rank without samples calls step(fn, None).",
        next(iter(ended)) if len(ended) == 1 else None,
        told,
    )


def elsewhere_error(calls: Sequence[str], after: str) -> AdaptiveUsageError:
    """Return the error where ranks have come to different calls.

    Args:
        calls: the call of each rank.
        after: what holds now.
    """
    ranks: dict[str, list[str]] = {}
    for rank, call in enumerate(calls):
        ranks.setdefault(call, []).append(str(rank))
    told = [f"{call} on rank {listed(who, most=8)}" for call, who in ranks.items()]
    # a mark says more than a name
    unseen = (
        ", by other functions of one name, or with parameters or buffers of other shapes or in "
        "another order"
        if len(ranks) == 1
        else ""
    )
    return AdaptiveUsageError(
        f"Ranks that work together are in different calls{unseen}: {listed(told, most=4)}. {after} "
        "Let every rank make the same calls, in the same order and with the same arguments but "
        "for the batch; a rank without samples calls step(fn, None)."
    )
