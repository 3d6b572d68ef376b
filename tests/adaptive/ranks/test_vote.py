"""What ranks say in a vote: the same is found on all of them, however many there are."""

import pytest
import torch
import torch.distributed as dist

from tenure.adaptive import AdaptiveUsageError, find_batch_size, step

from .launch import run_ranks


def idle(size):
    """Work that takes no memory."""


def still(size):
    """The same by another name."""


def voted_on(rank):
    """The loss of all to the last bit, their samples, the smallest of their sizes, their names."""
    weight, group = torch.ones(4, dtype=torch.float64, requires_grad=True), dist.group.WORLD
    torch.manual_seed(rank)
    x = torch.randn(rank + 1, 4, dtype=torch.float64) * 1e16 ** (-1) ** rank
    found = []
    for _ in range(2):
        result = step(lambda b: (b * weight).square().sum(1).mean(), x, group=group)
        least = find_batch_size(idle, low=8 + rank, high=8 + rank, margin=0, group=group)
        found.append([result.loss.item().hex(), result.n_samples, least])
    try:
        find_batch_size(still if rank else idle, high=1, group=group)
    except AdaptiveUsageError as error:
        found.append(str(error))
    return found


@pytest.mark.parametrize("n", [2, 3, 4, 5, 7])
def test_a_vote_is_the_same_on_all_ranks_however_many_there_are(n):
    first, *others = run_ranks(voted_on, n)
    assert others == [first] * (n - 1)
    *found, told = first
    assert [each[1:] for each in found] == [[n * (n + 1) // 2, 8]] * 2
    ranks = ", ".join(map(str, range(1, n)))
    assert f"find_batch_size('idle') on rank 0, find_batch_size('still') on rank {ranks}." in told
