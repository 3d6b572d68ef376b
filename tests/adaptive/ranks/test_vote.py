"""What a rank says in a vote: vectors of one length, or an error before it says anything."""

import pytest
import torch
import torch.distributed as dist

from tenure.adaptive import AdaptiveUsageError
from tenure.adaptive._ranks import MOST_TERMS, Ballot, rank_group, weights_of

from .launch import run_ranks


@pytest.mark.parametrize("n_terms", [0, 1, MOST_TERMS])
def test_weights_of_any_number_of_terms_take_the_room_of_a_ballot_without_any(n_terms):
    weights = weights_of([0.5] * n_terms, "weight() returned weights of")
    assert len(weights) == len(Ballot().weights)
    assert weights[:n_terms] == (0.5,) * n_terms
    assert not any(weights[n_terms:])


def test_more_terms_than_a_vote_has_room_for_are_refused_and_not_said():
    with pytest.raises(AdaptiveUsageError, match=r"^weight\(\) returned weights of 17 terms, and"):
        weights_of([1.0] * (MOST_TERMS + 1), "weight() returned weights of")


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
