import mmap

import pytest

from tenure._reserve import Reserve

MIB = 1 << 20


@pytest.fixture
def room(monkeypatch):
    """Room for so many bytes at once; what is there more is refused, as by a limit."""
    kept = {"at most": 20 * MIB}
    mapped = mmap.mmap

    def limited(number, n_bytes, **flags):
        if n_bytes > kept["at most"]:
            raise OSError("Cannot allocate memory")
        return mapped(number, n_bytes, **flags)

    monkeypatch.setattr(mmap, "mmap", limited)
    return kept


def test_the_largest_that_there_is_room_for_is_kept_until_it_is_freed(room):
    reserve = Reserve(64 * MIB, 16 * MIB, 4 * MIB)
    assert reserve.n_bytes == 0
    reserve.take()
    assert reserve.n_bytes == 16 * MIB
    reserve.free()
    reserve.free()
    assert reserve.n_bytes == 0


def test_what_is_kept_stays_until_it_is_freed_though_there_is_more_room_now(room):
    reserve = Reserve(64 * MIB, 4 * MIB)
    reserve.take()
    room["at most"] = 64 * MIB
    reserve.take()
    assert reserve.n_bytes == 4 * MIB
    reserve.free()
    reserve.take()
    assert reserve.n_bytes == 64 * MIB


def test_without_room_nothing_is_kept_and_nothing_is_raised(room):
    room["at most"] = 0
    reserve = Reserve(4 * MIB)
    reserve.take()
    reserve.free()
    assert reserve.n_bytes == 0
