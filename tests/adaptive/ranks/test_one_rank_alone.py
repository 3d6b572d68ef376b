"""What one rank asks of its replica while the others do something else: it exchanges nothing."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as Replicated

from tenure.adaptive import check_split, plan, predict_peak, step

from ..step.step_cases import gradients, worst_error
from .launch import run_ranks
from .rank_cases import RTOL, SIZES, all_samples, net_of, square, wanted_of


def checked(fn, b):
    return bool(check_split(fn, b))


def predicted(fn, b):
    return predict_peak(fn, b).peak_bytes > 0


def planned(fn, b):
    return plan(fn, b, "1GiB").micro_batch == len(b["x"])


def alone_on(rank, asks, unused):
    parts = all_samples(SIZES[:2])
    net = net_of()
    wanted = wanted_of(net, parts)
    module = Replicated(net, find_unused_parameters=unused)

    def fn(b):
        return square(module, b)

    # the first plain step finds the order of the buckets, and the next one tells all ranks
    fn(parts[rank]).backward()
    module.zero_grad()
    told = None
    if not rank:
        told = globals()[asks](fn, parts[rank])
    step(fn, parts[rank])
    error = worst_error(gradients(net), wanted)
    module.zero_grad()
    for _ in range(2):
        module.zero_grad()
        fn(parts[rank]).backward()
    mine = torch.cat([each.flatten() for each in gradients(net).values()])
    mean = mine / 2
    dist.all_reduce(mean)
    return told, error, float((mean - mine).abs().max())


@pytest.mark.parametrize("unused", [False, True], ids=["all", "unused"])
@pytest.mark.parametrize("asks", ["checked", "predicted", "planned"])
def test_one_rank_may_ask_after_a_plain_step_of_all(asks, unused):
    (told, error, apart), (_, other_error, other_apart) = run_ranks(
        alone_on, asks=asks, unused=unused, timeout=20
    )
    assert told is True
    assert max(error, other_error) < RTOL
    assert max(apart, other_apart) < 1e-12
