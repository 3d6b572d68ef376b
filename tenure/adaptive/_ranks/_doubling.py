"""One vector over all ranks, in as few messages after one another as there can be.

Invariant: what two ranks make of each other's numbers is the same on both, to the bit, so that all
come to the same result. A rank that is not there is an error on whoever waits for it, who closes
its connections then, which is an error on whoever waits for that one.

Source: recursive doubling, Thakur, Rabenseifner, Gropp 2005, Optimization of Collective
Communication Operations in MPICH.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

_TAG = 0


def combine(
    votes: Any,
    tensor: Tensor,
    of_two: Callable[[Tensor, Tensor], Tensor],
    patience: timedelta | None = None,
) -> None:
    """Replace a tensor of the CPU by what is made of those of all ranks, in place.

    Ranks beyond the largest power of two give theirs to one below it, and get the result.

    Args:
        votes: a group of gloo.
        tensor: of the same shape and type on all ranks.
        of_two: of what two ranks have, whichever is which.
        patience: how long each message may take; None: as long as the group says.
    """
    rank, size = votes.rank(), votes.size()
    n_paired = 1 << (size.bit_length() - 1)
    theirs = torch.empty_like(tensor)
    how = () if patience is None else (patience,)

    def send(to: int) -> Any:
        return votes.send([tensor], to, _TAG)

    def receive(source: int) -> None:
        votes.recv([theirs], source, _TAG).wait(*how)

    if rank >= n_paired:
        send(rank - n_paired).wait(*how)
        receive(rank - n_paired)
        tensor.copy_(theirs)
        return
    outer = rank + n_paired
    if outer < size:
        receive(outer)
        tensor.copy_(of_two(tensor, theirs))
    distance = 1
    while distance < n_paired:
        sent = send(rank ^ distance)
        receive(rank ^ distance)
        sent.wait(*how)
        tensor.copy_(of_two(tensor, theirs))
        distance *= 2
    if outer < size:
        send(outer).wait(*how)
