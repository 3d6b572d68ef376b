"""The account of memory that no mode sees: whom it tells, and what is left after a refusal.

By private names, because what calls them takes memory of sizes that no test can choose.
"""

import weakref

import pytest
import torch

from tenure._account import available_bytes, close_limit, moved, open_limit, taken
from tenure.adaptive import memory_budget
from tests.threads import on_thread

CPU = torch.device("cpu")


class Told:
    """A limit that takes no more than so many bytes at once."""

    def __init__(self, most_bytes):
        self.most_bytes, self.taken, self.moved = most_bytes, [], []

    def note_taken(self, made, what):
        (n_bytes,) = (tensor.nbytes for tensor in made)
        if n_bytes > self.most_bytes:
            made.clear()
            raise torch.OutOfMemoryError(what)
        self.taken.append((what, n_bytes))

    def note_moved(self, before, after):
        self.moved.append((before.nbytes(), after.nbytes()))


def test_an_open_limit_is_told_what_its_own_thread_takes_and_what_it_refuses_is_gone():
    limit, refused = Told(1000), []

    def make():
        tensor = torch.ones(1001)
        refused.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    open_limit(limit)
    made = taken(lambda: torch.ones(10), "ring")
    moved(made, torch.ones(5))
    assert made.equal(torch.ones(10))
    with pytest.raises(torch.OutOfMemoryError, match=r"^ring$") as caught:
        taken(make, "ring")
    # while the error is handled
    assert caught.tb is not None
    assert refused[0]() is None
    on_thread(taken, lambda: torch.ones(1), "ring")
    close_limit(limit)
    close_limit(limit)
    taken(lambda: torch.ones(1), "ring")
    assert (limit.taken, limit.moved) == ([("ring", 40)], [(40, 20)])


def test_a_budget_counts_what_is_taken_and_refuses_more():
    with memory_budget(100) as budget:
        first = taken(lambda: torch.frombuffer(bytearray(60), dtype=torch.uint8), "the ring")
        with pytest.raises(torch.OutOfMemoryError) as caught:
            taken(lambda: torch.frombuffer(bytearray(41), dtype=torch.uint8), "the ring")
        assert str(caught.value) == (
            "cpu out of memory. Tried to allocate 41 B (41 bytes) in the ring. memory_budget has a "
            "limit of 100 B (100 bytes) on cpu of which 40 B (40 bytes) is free; 60 B (60 bytes) "
            "is in use by what was made in its block. Make less at a time, free tensors, or "
            "raise the limit."
        )
        assert available_bytes(CPU, 10**9) == 40
        first.add_(1)  # an operation that sees it counts it no second time
        assert budget.live_bytes == budget.peak_bytes == 60
        del first
        assert budget.live_bytes == 0
    assert available_bytes(CPU, 10**9) == 10**9


def test_what_takes_the_place_of_memory_from_before_counts_as_little_as_that():
    before = torch.ones(10)
    with memory_budget(100) as budget:
        after = torch.frombuffer(bytearray(40), dtype=torch.float32)
        moved(before, after)
        after.add_(1)
        assert budget.live_bytes == 0
        inside = torch.ones(10)
        assert budget.live_bytes == 40
        last = torch.frombuffer(bytearray(40), dtype=torch.float32)
        moved(inside, last)
        del inside
        assert budget.live_bytes == 40
        del last
        assert budget.live_bytes == 0


def test_each_open_budget_counts_all_storages_of_a_tensor_and_none_of_another_device():
    with memory_budget(1000) as outer, memory_budget(500) as inner:
        kept = [
            taken(torch.eye(3).to_sparse, "resident"),
            taken(lambda: torch.empty(0), "nothing"),
            taken(lambda: torch.ones(400, device="meta"), "ring"),
            taken(lambda: torch.frombuffer(bytearray(40), dtype=torch.uint8), "ring"),
        ]
        assert outer.live_bytes == inner.live_bytes == 2 * 3 * 8 + 3 * 4 + 40
    assert len(kept) == 4
