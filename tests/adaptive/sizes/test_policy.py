"""What measuring says of larger sizes, as functions of numbers alone."""

from hypothesis import given
from hypothesis import strategies as st

from tenure.adaptive._sizes._policy import Measured, blind, fitting, short_of

SIZES = st.integers(20, 10**4)


def needs(size, fixed, each, power=1):
    return fixed + each * size**power


@given(SIZES, st.floats(1.1, 8), st.floats(1.1, 8), st.integers(0, 10**9), st.integers(10, 10**4))
def test_two_sizes_show_the_fixed_part(size, grown, room, fixed, each):
    larger = int(size * grown) + 1
    points = [Measured(s, needs(s, fixed, each)) for s in (size, larger)]
    largest = int(larger * room)
    fits = fitting(points, needs(largest, fixed, each))
    assert fits <= largest
    alone = fitting(points[1:], needs(largest, fixed, each))
    assert alone <= largest
    if fixed == 0:
        assert alone >= largest - 1


@given(SIZES, SIZES, st.integers(0, 10**9), st.integers(1, 10**4), st.sampled_from([1, 1.5, 2]))
def test_a_size_that_fits_in_the_careful_view_fits_whatever_memory_grows_with(
    size, more, fixed, each, power
):
    points = [Measured(s, int(needs(s, fixed, each, power))) for s in (size, size + more)]
    free_bytes = int(needs(2 * (size + more), fixed, each, power))
    for known in (points, points[1:]):
        fits = fitting(known, free_bytes, is_steep=True)
        assert needs(fits, fixed, each, power) <= free_bytes * 1.001 + each


@given(SIZES, st.integers(1, 10**4))
def test_less_memory_than_a_size_needed_fits_less(size, each):
    points = [Measured(size, needs(size, 0, each))]
    assert fitting(points, needs(size // 2, 0, each)) == size // 2
    assert fitting(points, 0) == 0
    noisy = [*points, Measured(size + 1, needs(size, 0, each))]
    assert fitting(noisy, needs(size // 2, 0, each)) <= size


def test_two_sizes_that_an_allocator_rounds_to_one_segment_are_no_reason_for_the_smallest():
    segment = 20 << 20
    points = (Measured(2048, segment), Measured(4096, segment))
    assert fitting(points, segment // 4) == 1024


@given(st.integers(4, 10**9), st.integers(1, 20), st.booleans())
def test_nothing_goes_below_a_quarter_blindly(size, n_failures, is_mended):
    assert size // 4 <= blind(size, n_failures, is_mended=is_mended) <= size // 2


def test_what_failed_is_neither_reached_nor_neared_at_once():
    assert short_of(bad=100, ok=40, wanted=90, align=5) == 90
    assert short_of(bad=100, ok=40, wanted=99, align=5) == 95
    assert short_of(bad=100, ok=40, wanted=100, align=5) == 70
    assert short_of(bad=100, ok=40, wanted=1000, align=5) == 70
