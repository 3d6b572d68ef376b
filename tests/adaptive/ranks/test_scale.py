"""What ranks say in a step of thousands, in a group of torch's own that sends nothing.

The private module is patched, because nobody has a machine with so many ranks, and no test could
bring about that several have ended when one looks.
"""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from tenure.adaptive import memory_budget, reset, step
from tenure.adaptive._ranks import _group, lost_rank_error

from ..step.step_cases import small_net


@pytest.fixture(params=[8, 4096])
def world(request):
    """How many ranks there are, and what they were asked."""
    n, asked = request.param, []
    plain = dist.all_reduce

    def as_if_all_said_the_same(tensor, op=dist.ReduceOp.SUM, **how):
        asked.append("a sum")
        plain(tensor, op=op, **how)
        if op == dist.ReduceOp.SUM:
            tensor.mul_(n)

    def as_if_all_voted_the_same(_, tensor, of_two, patience):
        asked.append("a vote")
        for _ in range(n.bit_length() - 1):
            tensor.copy_(of_two(tensor, tensor))

    def as_if_all_were_there(ranks, entry):
        ranks._votes = object()

    dist.init_process_group("fake", rank=0, world_size=n, store=FakeStore())
    with (
        patch.object(dist, "all_reduce", as_if_all_said_the_same),
        patch.object(_group.RankGroup, "connect", as_if_all_were_there),
        patch.object(_group, "combine", as_if_all_voted_the_same),
    ):
        yield n, asked
    dist.destroy_process_group()


def test_a_step_of_several_attempts_votes_once_whatever_the_number_of_ranks(world):
    reset()
    n, asked = world
    net = small_net()
    x = torch.randn(512, 4, dtype=torch.float64)
    net(x).square().mean().backward()
    want = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    model = DistributedDataParallel(net)
    asked.clear()
    with memory_budget("64KiB"):
        result = step(lambda b: model(b).square().mean(), x)
    assert result.attempts > 1
    assert len(result.sizes) > 1
    assert result.n_samples == 512 * n
    # the loss is in the vote, and all gradients are summed together
    assert asked == ["a vote", "a sum"]
    for p, gradient in zip(net.parameters(), want, strict=True):
        torch.testing.assert_close(p.grad, gradient)


def test_several_ranks_that_have_ended_are_named_together():
    ended = {1: "rank 1 (process 7 on here)", 3: "rank 3 (process 9 on here)"}
    error = lost_rank_error(RuntimeError("closed"), 4, ended)
    assert str(error).startswith(
        "Of 4 ranks rank 1 (process 7 on here), rank 3 (process 9 on here) have ended while others "
        "wait for them (RuntimeError: closed)."
    )
    assert error.rank is None
