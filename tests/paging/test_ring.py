"""Ranges of the ring, whose invariants no model could reach all cases of: hence private names."""

from hypothesis import given
from hypothesis import strategies as st

from tenure.paging._memory import ByteRing, Fences

SIZES = st.integers(1, 40)
MOVES = st.lists(st.tuples(st.booleans(), SIZES, st.integers(0, 10)), max_size=60)


@given(capacity=st.integers(1, 100), moves=MOVES)
def test_ranges_never_overlap_and_are_refused_only_where_no_gap_is_wide_enough(capacity, moves):
    ring, taken = ByteRing(capacity), {}
    for is_free, n_bytes, which in moves:
        if is_free and taken:
            start = sorted(taken)[which % len(taken)]
            ring.free(start)
            del taken[start]
            continue
        used = {byte for start, end in taken.items() for byte in range(start, end)}
        fits = any(
            not used & set(range(start, start + n_bytes)) for start in range(capacity - n_bytes + 1)
        )
        start = ring.place(n_bytes)
        assert (start is not None) == fits
        if start is not None:
            assert not used & set(range(start, start + n_bytes))
            taken[start] = start + n_bytes


@given(sizes=st.lists(st.integers(1, 20), min_size=1, max_size=40))
def test_two_neighbours_always_fit_where_the_ring_holds_the_largest_three_times(sizes):
    """First in, first out, one range in the middle leaves room enough on one of its sides."""
    capacity = 3 * max(sizes)
    ring, starts = ByteRing(capacity), []
    for n_bytes in sizes:
        if len(starts) == 2:
            ring.free(starts.pop(0))
        starts.append(ring.place(n_bytes))
        assert starts[-1] is not None


@given(
    fences=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10)), max_size=12),
    taken=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10)), max_size=8),
)
def test_each_byte_owes_its_events_exactly_once(fences, taken):
    ours, model = Fences(), {byte: set() for byte in range(50)}
    for event, (start, n_bytes) in enumerate(fences):
        ours.add(start, start + n_bytes, event)
        for byte in range(start, start + n_bytes):
            model[byte].add(event)
    for start, n_bytes in taken:
        wanted = set().union(*(model[byte] for byte in range(start, start + n_bytes)))
        assert set(ours.take(start, start + n_bytes)) == wanted
        for byte in range(start, start + n_bytes):
            model[byte].clear()
    assert (len(ours) == 0) == (not any(model.values()))
