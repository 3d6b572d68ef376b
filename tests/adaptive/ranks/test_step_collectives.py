"""Collectives of the user's beside those of a step, and in the work that ranks run as they like."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as Replicated

from tenure.adaptive import find_batch_size, step

from ..step.step_cases import gradients, worst_error
from .launch import run_ranks
from .rank_cases import RTOL, SIZES, Fails, all_samples, net_of, square, wanted_of


def told_by(work):
    try:
        work()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return [None, ""]


def sum_of(rank):
    """What ranks get that reduce something of their own."""
    found = torch.tensor(1.0 + rank)
    dist.all_reduce(found)
    return float(found)


# --- inside of the work


def inside_on(rank, most, has_samples):
    parts = all_samples(SIZES[:2])
    net = net_of()
    wanted = wanted_of(net, parts)
    module = Replicated(net)
    # rank 1 runs out of memory before, or after, it has called the collective
    early, late = (Fails(most if rank else None) for _ in range(2))

    def fn(b):
        loss = square(module, b)
        early(b["x"])
        logged = loss.detach().clone()
        dist.all_reduce(logged)
        late(b["x"])
        return loss

    told = told_by(lambda: step(fn, parts[rank] if has_samples or not rank else None))
    is_clean = not gradients(net)
    summed = sum_of(rank)
    step(lambda b: square(module, b), parts[rank])
    return told, is_clean, summed, worst_error(gradients(net), wanted)


@pytest.mark.parametrize(
    ("most", "has_samples"), [(None, True), (2, True), (None, False)],
    ids=["all at once", "one retries", "one without samples"],
)  # fmt: skip
def test_a_collective_in_the_function_is_an_error_by_name_before_it_begins(most, has_samples):
    first, second = run_ranks(inside_on, most=most, has_samples=has_samples)
    for (name, text), is_clean, summed, error in (first, second):
        assert name in ("AdaptiveUsageError", "RemoteRankError")
        assert "'inside_on.<locals>.fn', run by step()" in text or "'fn', run by step()" in text
        assert "called torch.distributed.all_reduce()" in text
        assert "Nothing was sent" in text
        assert is_clean
        assert summed == 3
        assert error < RTOL
    assert first[0][0] == "AdaptiveUsageError"
    assert (second[0][0] == "AdaptiveUsageError") is has_samples


def inside_a_search_on(rank):
    def evaluate(batch_size):
        dist.barrier()

    def search():
        find_batch_size(evaluate, high=4, group=dist.group.WORLD)

    return told_by(search), sum_of(rank)


def test_a_collective_in_a_function_with_a_group_is_an_error_by_name():
    for (name, text), summed in run_ranks(inside_a_search_on):
        assert name == "AdaptiveUsageError"
        assert "called torch.distributed.barrier()" in text
        assert summed == 3


def alone_on(rank):
    """What only asks, and what a group of one rank says, waits for nobody."""
    groups = [dist.new_group([each]) for each in range(2)]
    parts = all_samples(SIZES[:2])
    net = net_of()
    wanted = wanted_of(net, parts)
    module = Replicated(net)

    def fn(b):
        loss = square(module, b)
        logged = loss.detach().clone()
        dist.all_reduce(logged, group=groups[dist.get_rank()])
        assert logged == loss
        return loss * dist.get_world_size() / 2

    step(fn, parts[rank])
    return worst_error(gradients(net), wanted)


def test_what_waits_for_nobody_may_be_called_in_the_function():
    assert max(run_ranks(alone_on)) < RTOL


# --- beside it


def beside_on(rank):
    """One that is under way on one rank, where another has failed in a step before it begins."""
    parts = all_samples(SIZES[:2])
    net = net_of()
    module = Replicated(net)
    fails = Fails(0 if rank else None, ValueError)
    found = torch.full((3,), 1.0 + rank)
    work = None if rank else dist.all_reduce(found, async_op=True)
    told = told_by(lambda: step(lambda b: (fails(b["x"]), square(module, b))[1], parts[rank]))
    work = dist.all_reduce(found, async_op=True) if work is None else work
    work.wait()
    return told[0], found.tolist()


def test_a_vote_does_not_meet_a_collective_that_the_program_has_begun():
    (other, found), (own, also_found) = run_ranks(beside_on)
    assert (other, own) == ("RemoteRankError", "ValueError")
    assert found == also_found == [3.0] * 3


def found_again_on(rank):
    """Groups to vote in, of all ranks and of some: made once each."""
    made, plain = [], dist.ProcessGroupGloo
    some = dist.new_group([0, 2])
    dist.ProcessGroupGloo = lambda *args: made.append(plain(*args)) or made[-1]
    parts = all_samples(SIZES[:3])
    net = net_of()
    counts = []
    for _ in range(2):
        for group in (dist.group.WORLD, some):
            if group is some and rank == 1:
                continue
            result = step(lambda b: square(net, b), parts[rank], group=group)
            counts.append(result.n_samples)
    return counts, len(made)


def test_ranks_connect_once_for_a_group_also_where_others_are_in_none():
    outer = SIZES[0] + SIZES[2]
    for rank, (counts, n_made) in enumerate(run_ranks(found_again_on, 3)):
        inner = [] if rank == 1 else [outer]
        assert counts == [sum(SIZES[:3]), *inner] * 2
        assert n_made == (1 if rank == 1 else 2)


# --- a rank that ends


def ending_on(rank, how):
    """One of five ranks ends; the others stay, and none of them tells the next by its own end."""
    parts = all_samples((3,) * 5)
    module = Replicated(net_of())
    step(lambda b: square(module, b), parts[rank])
    if rank == 3:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(0)
    start = time.monotonic()
    told = []
    for _ in range(2):
        try:
            step(lambda b: square(module, b), parts[rank])
        except Exception as error:
            told.append([type(error).__name__, str(error), error.rank])
    waited = time.monotonic() - start
    # long enough for one that would only be told by the end of this one
    time.sleep(5)
    return told, waited


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "left"])
def test_a_rank_that_has_ended_is_named_on_all_others_while_they_go_on(how):
    found = run_ranks(ending_on, 5, how=how, has_end=False)
    assert found[3] is None
    for told, waited in (each for each in found if each is not None):
        assert [name for name, _, _ in told] == ["RemoteRankError"] * 2
        assert [rank for _, _, rank in told] == [3, 3]
        assert "Of 5 ranks rank 3 (process " in told[0][1]
        assert " has ended while others wait for it (RuntimeError: " in told[0][1]
        assert "a rank was lost in a call before" in told[1][1]
        assert waited < 4
