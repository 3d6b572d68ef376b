"""`find_batch_size` with ``group=``, and `batch` and `range` on several ranks, each its own."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as Replicated

from tenure import adaptive
from tenure.adaptive import AdaptiveUsageWarning, RemoteRankError, execute

from .launch import run_ranks
from .rank_cases import net_of


def oom():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")


def large_on(rank, sizes):
    """The smallest of the sizes of ranks that may each run with one size alone."""
    size, tried = sizes[rank], []
    found = adaptive.find_batch_size(
        tried.append, low=size, high=size, margin=0, group=dist.group.WORLD
    )
    return found, tried


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        # from here on squares in 64-bit floats are not exact, and from 2 ** 53 on sizes are not
        ((100_000_001, 100_000_001), 100_000_001),
        ((2**53 + 1, 2**53), 2**53),
        ((2**70, 2**70), 2**63 - 1),
    ],
)
def test_sizes_are_compared_exactly_however_large(sizes, found):
    (one, tried), (other, others) = run_ranks(large_on, sizes=sizes, timeout=20)
    assert one == other == found
    assert ([*set(tried)], [*set(others)]) == ([sizes[0]], [sizes[1]])


def failing_on(rank):
    """A function that fails on one rank, at whatever size."""

    def fail(size):
        if rank == 1:
            raise ValueError("no labels")

    told = []
    try:
        adaptive.find_batch_size(fail, high=8, group=dist.group.WORLD)
    except (ValueError, RemoteRankError) as error:
        told = [type(error).__name__, str(error)]
    # and another call of all
    total = torch.ones(1)
    dist.all_reduce(total)
    return told, total.item()


def test_an_error_on_one_rank_is_an_error_on_all():
    (told, total), (own, _) = run_ranks(failing_on)
    assert own[0] == "ValueError"
    assert told[0] == "RemoteRankError"
    assert "failed on rank 1 (ValueError: no labels) of 2 ranks" in told[1]
    assert "No rank gets a result." in told[1]
    assert total == 2


def found_on(rank):
    def train(n):
        if n > (90, 50)[rank]:
            oom()

    alone = adaptive.find_batch_size(train, high=256, margin=0)
    return alone, adaptive.find_batch_size(train, high=256, margin=0, group=dist.group.WORLD)


def test_ranks_find_the_smallest_of_their_sizes():
    (alone, together), (other_alone, other_together) = run_ranks(found_on)
    assert other_alone < alone
    assert together == other_together == other_alone


def refused_on(rank):
    module = Replicated(net_of())

    def work(n):
        module(torch.ones(n, 4, dtype=torch.float64)).sum()

    try:
        adaptive.find_batch_size(work, high=8, group=dist.group.WORLD)
    except adaptive.AdaptiveUsageError as error:
        return str(error)


def test_a_replica_in_such_a_call_is_refused_by_name():
    for told in run_ranks(refused_on):
        assert "runs a DistributedDataParallel, which waits for other ranks" in told


def warned_on(rank):
    """Calls are this process's own; `batch` says that sizes may differ."""

    def work(*sizes):
        if rank and sizes[-1] - (sizes[0] if len(sizes) > 1 else 0) > 2:
            oom()

    counts = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call in (execute.batch(8), execute.range(0, 8, 8)):
            call(work)
            counts.append(sum(issubclass(each.category, AdaptiveUsageWarning) for each in caught))
        said = [str(each.message) for each in caught]
    return counts, said


def test_a_smaller_batch_is_said_once_and_pieces_are_not():
    (zero, _), (one, said) = run_ranks(warned_on)
    assert zero == [0, 0]
    assert one == [1, 1]
    assert "ask find_batch_size(..., group=torch.distributed.group.WORLD)" in said[0]


def lambdas_on(rank):
    """Ranks in calls of one name, whose lambdas stand on different lines."""
    work = [
        lambda *_: torch.ones(1),
        lambda *_: torch.zeros(1),
    ][rank]
    try:
        adaptive.find_batch_size(work, high=8, group=dist.group.WORLD)
    except adaptive.AdaptiveUsageError as error:
        return str(error)


def test_lambdas_of_two_calls_are_told_apart():
    for told in run_ranks(lambdas_on):
        assert "different calls, by other functions of one name" in told


def test_a_process_alone_asks_for_no_group():
    assert adaptive.find_batch_size(lambda n: n, high=8, margin=0, group="any") == 8
