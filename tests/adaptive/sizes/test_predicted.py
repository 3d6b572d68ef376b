"""The largest size that a prediction says fits, in few predictions."""

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
