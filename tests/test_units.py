"""How bytes are spelled."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenure._units import format_bytes


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (65_536, "64.0 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (-1_572_864, "-1.5 MiB"),
        (3 * 1024**3, "3.0 GiB"),
        (5000 * 1024**4, "5000.0 TiB"),
        (-1, "-1 B"),
    ],
)
def test_unit_is_the_largest_that_leaves_a_number_below_1024(n_bytes, text):
    assert format_bytes(n_bytes) == text


@given(st.integers(min_value=1, max_value=2**60))
def test_sign_only_adds_a_minus(n_bytes):
    assert format_bytes(-n_bytes) == f"-{format_bytes(n_bytes)}"
