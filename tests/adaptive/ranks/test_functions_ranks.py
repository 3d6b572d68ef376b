"""`find_batch_size` with ``group=``, and `batch` and `range` on several ranks, each its own."""

import warnings

import pytest
import torch
import torch.distributed as dist

from tenure import adaptive
from tenure.adaptive import AdaptiveUsageError, AdaptiveUsageWarning, RemoteRankError, execute

from .launch import run_checks


def find(work, **options):
    return adaptive.find_batch_size(work, margin=0, group=dist.group.WORLD, **options)


def above(largest):
    def work(*sizes):
        if sizes[-1] > largest:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")

    return work


def the_smallest_of_their_sizes(rank):
    assert find(above((90, 50)[rank]), high=256) == adaptive.find_batch_size(
        above(50), high=256, margin=0
    )
    # from here on squares in 64-bit floats are not exact, and from 2 ** 53 on sizes are not
    for sizes, found in (((100_000_001,) * 2, 100_000_001), ((2**53 + 1, 2**53), 2**53)):
        assert find(lambda n: None, low=sizes[rank], high=sizes[rank]) == found


def an_error_on_one_rank(rank):
    def fail(size):
        if rank == 1:
            raise ValueError("no labels")

    told = "no labels" if rank else r"failed on rank 1 \(ValueError: no labels\) of 2 ranks.* No ra"
    with pytest.raises(ValueError if rank else RemoteRankError, match=told):
        find(fail, high=8)
    with pytest.raises(AdaptiveUsageError if rank else RemoteRankError, match="low=9"):
        find(print, low=9 if rank else 1, high=8)


def a_smaller_batch_is_said_once_and_pieces_are_not(rank):
    """Calls are this process's own; `batch` says that sizes may differ."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        execute.batch(8)(lambda size: above(2)(rank * size))
        execute.range(0, 8, 8)(lambda start, end: above(2)(rank * (end - start)))
    said = [str(each.message) for each in caught if each.category is AdaptiveUsageWarning]
    assert len(said) == rank
    assert all("ask find_batch_size(..., group=torch.distributed.group.WORLD)" in _ for _ in said)


def test_ranks_search_together_and_call_alone():
    run_checks(
        the_smallest_of_their_sizes,
        an_error_on_one_rank,
        a_smaller_batch_is_said_once_and_pieces_are_not,
    )
