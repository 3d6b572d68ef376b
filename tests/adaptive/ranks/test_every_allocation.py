"""Each allocation of a step fails once, on each of four ranks: the gradients are exact."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as Replicated
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tenure.adaptive import reset, step

from ..step.step_cases import gradients, worst_error
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


def swept_on(rank, idle, loss, victims):
    """What becomes of the gradients of this rank, for each allocation of some ranks."""
    parts = all_samples()
    batch = None if rank == idle else parts[rank]
    reduce = torch.sum if loss == "sum" else torch.mean
    net = net_of()
    whole = joined([part for i, part in enumerate(parts) if i != idle])
    # a gradient of before, of which half waits for an exchange
    reduce(net(whole["x"]).square()).backward()
    wanted = {name: grad.clone() for name, grad in gradients(net).items()}
    net.zero_grad()
    module = Replicated(net)

    def fn(b):
        return reduce(module(b["x"]).square())

    exact, errors, n_runs = 0, [], 0
    for victim in victims:
        n = 0
        while True:
            n += 1
            reset()
            net.zero_grad()
            net[0].bias.grad = torch.ones_like(net[0].bias) * rank
            failing = Failing(n if rank == victim else 0)
            told = None
            try:
                with failing:
                    step(fn, batch, loss=loss)
            except Exception as error:
                told = type(error).__name__
            got = gradients(net)
            n_runs += 1
            if told:
                assert got.keys() == {"0.bias"}
                assert torch.equal(got["0.bias"], torch.ones_like(got["0.bias"]) * rank)
                errors.append(told)
            else:
                got["0.bias"] -= sum(range(4)) / 4
                assert worst_error(got, wanted) < RTOL
                exact += 1
            # whether the victim has met its failure
            met = torch.tensor([int(failing.n_seen >= n and rank == victim), int(told is not None)])
            dist.all_reduce(met)
            assert met[1] in (0, 4), f"{told}, and not on all ranks"
            if not met[0]:
                break
    return {"exact": exact, "errors": errors, "n_runs": n_runs}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("idle", "loss", "victims"),
    [(None, "mean", range(4)), (2, "mean", (2, 1)), (0, "sum", (0,))],
    ids=["all have samples", "one has none", "a sum, and the first has none"],
)
def test_ranks_finish_with_exact_gradients_whichever_allocation_fails(idle, loss, victims):
    ranks = run_ranks(
        swept_on, 4, timeout=400, idle=idle, loss=loss, victims=list(victims)
    )  # fmt: skip
    for found in ranks:
        assert found["errors"] == []
        assert found["exact"] == found["n_runs"] >= 8 * len(victims)
