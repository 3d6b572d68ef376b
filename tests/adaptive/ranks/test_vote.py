"""What ranks say in a vote: the same is found on all of them."""

import pytest
import torch
import torch.distributed as dist

from tenure.adaptive._ranks import rank_group

from .launch import run_ranks


def voted_on(rank):
    """Sums and smallest of several votes one after the other; sums have the same bits on all."""
    n = dist.get_world_size()
    group = rank_group("step", dist.group.WORLD)
    found = []
    for i in range(3):
        numbers = torch.tensor([rank + 1, 0.1 * rank * (i + 1), 1e16 * (-1) ** rank]).double()
        group.vote(numbers)
        assert abs(float(numbers[1]) - 0.1 * (i + 1) * n * (n - 1) / 2) < 1e-6
        least = group.smallest([rank + i, -rank])
        found.append([float(numbers[0]), *least, *group.gather(["rank", rank])[-1]])
        everywhere = [torch.empty_like(numbers) for _ in range(n)]
        dist.all_gather(everywhere, numbers)
        assert all(torch.equal(each, numbers) for each in everywhere)
    return found


@pytest.mark.parametrize("n", [2, 3, 4, 5, 7])
def test_a_vote_is_the_same_on_all_ranks_however_many_there_are(n):
    wanted = [[n * (n + 1) / 2, i, 1 - n, "rank", n - 1] for i in range(3)]
    assert run_ranks(voted_on, n) == [wanted] * n
