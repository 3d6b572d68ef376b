"""Which sizes may be tried at all."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenure.adaptive import AdaptiveUsageError
from tenure.adaptive._sizes._limits import checked_initial, checked_limits

sizes = st.integers(1, 1 << 40)


@given(failed=sizes, wanted=st.integers(-(1 << 41), 1 << 41), minimum=sizes, align=sizes)
def test_a_size_after_a_failure_is_smaller_aligned_and_not_below_the_minimum(
    failed, wanted, minimum, align
):
    limits = checked_limits(minimum, None, align)
    smaller = limits.below(failed, wanted)
    if smaller is None:
        assert (failed - 1) // align * align < max(minimum, align)
    else:
        assert minimum <= smaller < failed
        assert smaller % align == 0


@given(failed=sizes, wanted=sizes)
def test_without_limits_any_smaller_size_is_allowed(failed, wanted):
    smaller = checked_limits(1, None, 1).below(failed, wanted)
    assert smaller == (None if failed == 1 else min(wanted, failed - 1))


def test_the_first_size_is_capped_and_aligned():
    assert checked_limits(1, 100, 8).first(64) == 64
    assert checked_limits(1, 100, 8).first(1000) == 96
    assert checked_limits(1, 100, 8).ceiling(64) == 96
    assert checked_limits(1, None, 8).ceiling(67) == 64


def test_an_initial_size_smaller_than_the_alignment_is_left_as_it_is():
    assert checked_limits(1, None, 8).first(5) == 5
    assert checked_limits(1, None, 8).below(5, 2) is None


def test_the_floor_is_the_smallest_aligned_size_that_is_allowed():
    assert checked_limits(5, None, 4).floor == 8
    assert checked_limits(1, None, 4).floor == 4


@pytest.mark.parametrize("value", [0, -1, 1.5, "8", True, None])
def test_what_is_no_size_is_refused_by_name(value):
    message = re.escape(f"align={value!r} is not a size. Give a whole number from 1 up.")
    with pytest.raises(AdaptiveUsageError, match=f"^{message}$"):
        checked_limits(1, None, value)


def test_limits_that_leave_no_size_are_refused():
    with pytest.raises(
        AdaptiveUsageError, match=r"^maximum=10 leaves no size: the smallest allowed "
    ):
        checked_limits(9, 10, 8)


@pytest.mark.parametrize(
    ("minimum", "align", "failed", "named"),
    [
        (8, 1, 8, "minimum="),
        (1, 8, 8, "align="),
        (8, 8, 8, "minimum= and align="),
        (16, 8, 16, "minimum="),
        (5, 4, 8, "minimum= or align="),
    ],
)
def test_what_allows_no_smaller_size_is_named(minimum, align, failed, named):
    limits = checked_limits(minimum, None, align)
    assert limits.below(failed, 1) is None
    assert limits.in_the_way_below(failed) == named


def test_an_initial_size_below_the_minimum_is_refused():
    with pytest.raises(AdaptiveUsageError, match=r"^initial_step=4 is below minimum=8\. Raise it"):
        checked_initial("initial_step", 4, checked_limits(8, None, 1))


def test_an_initial_size_that_whole_steps_bring_below_the_minimum_is_refused():
    limits = checked_limits(10, None, 8)
    with pytest.raises(
        AdaptiveUsageError,
        match=r"^initial_step=12 leaves no size: the smallest allowed is 16, by minimum=10 and ",
    ):
        checked_initial("initial_step", 12, limits)
    assert checked_initial("initial_step", 16, limits) == 16


def test_without_an_initial_size_the_search_begins_at_the_maximum():
    assert checked_initial("initial_step", None, checked_limits(1, 64, 1)) == 64
    assert checked_initial("initial_step", None, checked_limits(1, None, 1)) is None
