"""The account of memory that no mode sees: whom it tells, and what is left after a refusal.

By private names, because what calls them takes memory of sizes that no test can choose.
"""

import threading
import weakref

import pytest
import torch

from tenure._account import available_bytes, close_limit, moved, open_limit, taken
from tenure.adaptive import memory_budget

CPU = torch.device("cpu")


class Told:
    """A limit that takes no more than so many bytes at once."""

    def __init__(self, most_bytes=1000, free_bytes=None):
        self.most_bytes, self.free_bytes = most_bytes, free_bytes
        self.taken, self.moved = [], []

    def note_taken(self, made, what):
        (n_bytes,) = (tensor.nbytes for tensor in made)
        if n_bytes > self.most_bytes:
            made.clear()
            raise torch.OutOfMemoryError(what)
        self.taken.append((what, n_bytes))

    def note_moved(self, before, after):
        self.moved.append((before.nbytes(), after.nbytes()))

    def available_on(self, device):
        return self.free_bytes

    def counts(self, storage):
        return True


@pytest.fixture
def limit():
    limit = Told()
    open_limit(limit)
    yield limit
    close_limit(limit)


def test_an_open_limit_is_told_what_its_own_thread_takes(limit):
    made = taken(lambda: torch.ones(10), "ring")
    moved(made, torch.ones(5))
    assert made.equal(torch.ones(10))
    thread = threading.Thread(target=taken, args=(lambda: torch.ones(1), "ring"))
    thread.start()
    thread.join()
    close_limit(limit)
    close_limit(limit)
    taken(lambda: torch.ones(1), "ring")
    assert limit.taken == [("ring", 40)]
    assert limit.moved == [(40, 20)]


def test_what_is_refused_is_gone_while_the_error_is_handled(limit):
    made = []

    def make():
        tensor = torch.ones(1001)
        made.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    with pytest.raises(torch.OutOfMemoryError) as caught:
        taken(make, "ring")
    assert str(caught.value) == "ring"
    assert made[0]() is None


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


def test_a_tensor_of_several_storages_counts_with_all():
    with memory_budget(1000) as budget:
        kept = taken(torch.eye(3).to_sparse, "resident"), taken(lambda: torch.empty(0), "nothing")
        assert budget.live_bytes == 2 * 3 * 8 + 3 * 4
    del kept


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


def test_each_open_budget_counts_and_one_of_another_device_does_not():
    meta = torch.device("meta")
    with memory_budget(100) as outer, memory_budget(50) as inner:
        kept = taken(lambda: torch.ones(40, dtype=torch.uint8), "ring")
        other = taken(lambda: torch.ones(400, device=meta), "ring")
        assert outer.live_bytes == inner.live_bytes == 40
    assert len(kept) + len(other) == 440
