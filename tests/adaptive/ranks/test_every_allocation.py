"""Each allocation of a step fails once, on each of four ranks: the gradients are exact."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as Replicated
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tenure.adaptive import reset, step

from ..step.step_cases import gradients, wanted_of, worst_error
from .launch import run_ranks
from .rank_cases import RTOL, all_samples, joined, net_of


class Failing(TorchDispatchMode):
    """Lets the n-th allocation of a block fail; 0 counts."""

    def __init__(self, n):
        super().__init__()
        self.n, self.n_seen = n, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        there = {each.untyped_storage()._cdata for each in tensors((args, kwargs))}
        if any(each.untyped_storage()._cdata not in there for each in tensors(out)):
            self.n_seen += 1
            if self.n_seen == self.n:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        return out


def tensors(tree):
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]


def swept(rank, cases):
    for case in cases:
        swept_on(rank, *case)


def swept_on(rank, idle, loss, victims):
    """What becomes of the gradients of this rank, for each allocation of some ranks."""
    parts = all_samples()
    batch = None if rank == idle else parts[rank]
    reduce = torch.sum if loss == "sum" else torch.mean
    net = net_of()
    whole = joined([part for i, part in enumerate(parts) if i != idle])
    # a gradient of before, of which half waits for an exchange
    wanted = wanted_of(net, reduce(net(whole["x"]).square()))
    wanted["0.bias"] += sum(range(4)) / 4
    module = Replicated(net)
    for victim in victims:
        for n in itertools.count(1):
            reset()
            net.zero_grad()
            net[0].bias.grad = torch.ones_like(net[0].bias) * rank
            with Failing(n if rank == victim else 0) as failing:
                step(lambda b: reduce(module(b["x"]).square()), batch, loss=loss)
            assert worst_error(gradients(net), wanted) < RTOL
            # whether the victim has met its failure
            met = torch.tensor(int(failing.n_seen >= n and rank == victim))
            dist.all_reduce(met)
            if not met:
                break
        assert n >= 8


@pytest.mark.slow
def test_ranks_finish_with_exact_gradients_whichever_allocation_fails():
    # all have samples; one has none; a sum, and the first has none
    cases = [(None, "mean", (0, 3)), (2, "mean", (2, 1)), (0, "sum", (0,))]
    run_ranks(swept, 4, timeout=400, cases=cases)
