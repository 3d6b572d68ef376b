"""The largest size that a prediction says fits, in few predictions."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenure.adaptive._sizes._predicted import largest_predicted


class Cost:
    def __init__(self, fixed, each, power=1.0):
        self.fixed, self.each, self.power = fixed, each, power
        self.asked = []

    def __call__(self, size):
        self.asked.append(size)
        return self.fixed + int(self.each * size**self.power)


@settings(deadline=None, max_examples=300)
@given(
    st.integers(0, 10**9), st.integers(1, 10**6), st.floats(1, 2), st.integers(1, 50),
    st.integers(1, 10**6), st.integers(1, 100), st.floats(0, 2),
)  # fmt: skip
def test_it_fits_and_is_the_largest_but_for_one_percent(fixed, each, power, low, n, align, share):
    cost = Cost(fixed, each, power)
    low, high = low * align, (low + n) * align
    limit_bytes = int(cost(high) * share)
    found = largest_predicted(cost, low, high, limit_bytes, align)
    assert found % align == 0
    assert low <= found <= high
    assert found == low or cost(found) <= limit_bytes
    above = found + max(1, found // align // 100) * align
    assert above > high or cost(above) > limit_bytes
    assert len(cost.asked) < 100


def test_a_line_takes_four_predictions():
    cost = Cost(10**6, 1000)
    assert largest_predicted(cost, 1, 10**6, 10**6 + 12_345_678) == 12_345
    assert len(set(cost.asked)) <= 4


def test_what_fits_altogether_takes_one():
    cost = Cost(5, 1)
    assert largest_predicted(cost, 1, 1000, 10**6) == 1000
    assert cost.asked == [1000]
    assert largest_predicted(cost, 7, 7, 0) == 7


@pytest.mark.parametrize("limit", [1, 2, 3, 99, 100, 101, 777, 1000])
@pytest.mark.parametrize("power", [1, 2, 0])
def test_the_largest_takes_few_predictions_and_no_more_than_twice_a_bisection(limit, power):
    # with a power of 0 all that is told is whether a size fits
    cost = Cost(10**6, 1000, power) if power else lambda n: asked.append(n) or 2 * (n > limit)
    limit_bytes = cost(limit) if power else 1
    asked = cost.asked if power else []
    asked.clear()
    assert largest_predicted(cost, 1, 1000, limit_bytes, is_exact=True) == limit
    assert len(asked) == len(set(asked)) <= (14 if power else 24)
    if power == 1 and limit > 3:
        assert len(asked) <= 7
    assert limit == 1000 or limit + 1 in asked
