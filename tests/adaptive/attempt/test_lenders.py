"""Pagers and caches that give memory back when work runs out of it."""

import pytest

from tenure.adaptive import NoBatchsizeCache, batch
from tests.shrinking import shrinkables

OOM = "CUDA out of memory. Tried to allocate 2.00 GiB."


class Pager:
    def __init__(self, *gives):
        self.gives = list(gives)
        self.asked = []

    def shrink(self, device, n_bytes):
        self.asked.append((device, n_bytes))
        return self.gives.pop(0) if self.gives else 0


def sizes_of(lender, text=OOM):
    """The sizes that are tried of work that fits at 2 of 4."""
    sizes = []

    @batch(initial_batchsize=4, cache_type=NoBatchsizeCache)
    def work(size):
        sizes.append(size)
        if size > 2:
            raise RuntimeError(text)

    shrinkables.add(lender)
    try:
        work()
    finally:
        shrinkables.discard(lender)
    return sizes


@pytest.mark.parametrize(
    ("text", "given_bytes", "sizes"),
    [
        (OOM, 1 << 30, [4, 2]),
        (OOM, 2 << 30, [4, 4, 2]),
        # nobody knows how much was wanted
        ("CUDA error: out of memory", 1 << 20, [4, 4, 2]),
        # no memory helps
        ("Invalid buffer size: 24.00 GiB", 1 << 20, [4, 2]),
    ],
    ids=["less than was wanted", "as much", "unknown", "a limit of sizes"],
)
def test_a_pager_is_asked_before_the_size_shrinks(text, given_bytes, sizes):
    pager = Pager(given_bytes)
    assert sizes_of(pager, text) == sizes
    wanted = 2 << 30 if text == OOM else None
    n_asked = 0 if "Invalid" in text else len(sizes) - 1
    assert pager.asked == [("cuda", wanted)] * n_asked
    assert pager not in shrinkables.alive()


def test_a_pager_that_fails_is_logged_and_the_size_shrinks(caplog):
    class Broken:
        def shrink(self, device, n_bytes):
            raise ValueError("broken pager")

    assert sizes_of(Broken()) == [4, 2]
    assert "broken pager" in caplog.text
