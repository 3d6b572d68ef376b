"""`batch`, `range`, `chunked` and `find_batch_size` on several ranks: asked for by ``group=``."""

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


def batch_on(rank, fits, restore_rng):
    tried = []

    @adaptive.batch(initial_batchsize=64, group=dist.group.WORLD, restore_rng=restore_rng)
    def work(size):
        tried.append(size)
        drawn = torch.rand(1).item()
        if size > fits[rank]:
            oom()
        return size, drawn

    torch.manual_seed(0)
    first = torch.rand(1).item()
    torch.manual_seed(0)
    results = []
    for _ in range(2):
        results.append(work())
        tried.append(None)
    return results, tried, first


@pytest.mark.slow
@pytest.mark.parametrize("restore_rng", [False, True])
def test_all_ranks_run_with_the_size_that_fits_on_each(restore_rng):
    found = run_ranks(batch_on, 3, fits=(64, 20, 40), restore_rng=restore_rng)
    for results, tried, first in found:
        assert [size for size, _ in results] == [16, 16]
        assert (results[0][1] == first) is restore_rng
        # what one has learned is for all: none runs twice in the second call
        assert tried[-3:] == [None, 16, None]
    assert found[0][1][:2] == [64, 16]
    assert found[1][1][:3] == [64, 32, 16]
    assert found[2][1][:3] == [64, 32, 16]


def large_on(rank, initial, fits):
    """The sizes that a function ran with, and that the call returned."""
    tried = []

    @adaptive.batch(
        initial_batchsize=initial, group=dist.group.WORLD, reduce=lambda size, _: size - 1
    )
    def work(size):
        tried.append(size)
        if size > fits[rank]:
            oom()
        return size

    return work(), tried


@pytest.mark.parametrize(
    ("initial", "fits", "found"),
    [
        # from here on squares in 64-bit floats are not exact, and from 2 ** 53 on sizes are not
        (100_000_001, (100_000_001, 100_000_001), 100_000_001),
        (2**53 + 1, (2**53 + 1, 2**53), 2**53),
        (2**63 - 1, (2**63 - 1, 2**63 - 3), 2**63 - 3),
        (2**70, (2**70, 2**70), 2**63 - 1),
    ],
)
def test_sizes_are_compared_exactly_however_large(initial, fits, found):
    (one, tried), (other, _) = run_ranks(large_on, initial=initial, fits=fits, timeout=20)
    assert one == other == found
    assert tried == [min(initial, 2**63 - 1), *[found] * (fits[1] < initial)]


def failing_on(rank, entry):
    """A function that fails on one rank, at whatever size."""

    def fail(*sizes):
        if rank == 1:
            raise ValueError("no labels")
        return torch.ones(1)

    group = dist.group.WORLD
    calls = {
        "batch": lambda: execute.batch(8, group=group)(fail),
        "range": lambda: execute.range(0, 8, 4, group=group)(fail),
        "chunked": lambda: execute.chunked(torch.ones(8), 4, group=group)(fail),
        "find_batch_size": lambda: adaptive.find_batch_size(fail, high=8, group=group),
    }
    told = []
    try:
        calls[entry]()
    except (ValueError, RemoteRankError) as error:
        told = [type(error).__name__, str(error)]
    # and another call of all
    total = torch.ones(1)
    dist.all_reduce(total)
    return told, total.item()


@pytest.mark.parametrize("entry", ["batch", "range", "chunked", "find_batch_size"])
def test_an_error_on_one_rank_is_an_error_on_all(entry):
    (told, total), (own, _) = run_ranks(failing_on, entry=entry)
    assert own[0] == "ValueError"
    assert told[0] == "RemoteRankError"
    assert "failed on rank 1 (ValueError: no labels) of 2 ranks" in told[1]
    assert "No rank gets a result." in told[1]
    assert total == 2


def pieces_on(rank):
    """Pieces are each rank's own, also how many there are."""
    steps = []

    @adaptive.chunked(initial_step=8, collect="cat", group=dist.group.WORLD)
    def squared(chunk, start, end):
        if rank and len(chunk) > 2:
            oom()
        steps.append(len(chunk))
        return chunk**2

    return squared(torch.arange(5 + rank)).tolist(), steps


def test_pieces_of_each_rank_are_its_own():
    (zero, steps), (one, other_steps) = run_ranks(pieces_on)
    assert zero == [0, 1, 4, 9, 16]
    assert one == [0, 1, 4, 9, 16, 25]
    assert steps == [5]
    assert max(other_steps) <= 2
    assert sum(other_steps) == 6


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
    told = []
    for call in (
        lambda work: execute.batch(8, group=dist.group.WORLD)(work),
        lambda work: adaptive.find_batch_size(work, high=8, group=dist.group.WORLD),
    ):
        try:
            call(lambda n: module(torch.ones(n, 4, dtype=torch.float64)).sum())
        except Exception as error:
            told.append(str(error))
    return told


def test_a_replica_in_such_a_call_is_refused_by_name():
    for told in run_ranks(refused_on):
        assert len(told) == 2
        assert all("runs a DistributedDataParallel, which waits for other ranks" in t for t in told)


def warned_on(rank):
    """Without a group calls are this process's own; `batch` says that sizes may differ."""

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


def test_without_a_group_a_smaller_batch_is_said_once_and_pieces_are_not():
    (zero, _), (one, said) = run_ranks(warned_on)
    assert zero == [0, 0]
    assert one == [1, 1]
    assert "Pass group=torch.distributed.group.WORLD" in said[0]


def lambdas_on(rank):
    """Ranks in calls of one name, whose lambdas stand on different lines."""
    work = [
        lambda *_: torch.ones(1),
        lambda *_: torch.zeros(1),
    ][rank]
    group, told = dist.group.WORLD, []
    for call in (
        lambda: execute.batch(8, group=group)(work),
        lambda: execute.range(0, 8, 4, group=group)(work),
        lambda: execute.chunked(torch.ones(8), 4, group=group)(work),
        lambda: adaptive.find_batch_size(work, high=8, group=group),
    ):
        try:
            call()
        except adaptive.AdaptiveUsageError as error:
            told.append(str(error))
    return told


def test_lambdas_of_two_calls_are_told_apart():
    for told in run_ranks(lambdas_on):
        assert len(told) == 4
        assert all("different calls, by other functions of one name" in text for text in told)


def test_a_process_alone_asks_for_no_group():
    assert execute.batch(8, group=None)(lambda n: n) == 8
    assert execute.range(0, 4, 2, group="any", collect="list")(lambda a, b: b) == [2, 4]
