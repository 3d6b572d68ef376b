"""The bytes of a storage that a tensor shows."""

import pytest
import torch

from tenure._torch.storages import byte_range

BASE = torch.arange(24, dtype=torch.int32).view(4, 6)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (BASE, (0, 96)),
        (BASE[1:3], (24, 72)),
        (BASE[:, 1], (4, 80)),
        (BASE.t()[2:4], (8, 88)),
        (BASE[1].expand(5, 6), (24, 48)),
        (BASE[2, 3], (60, 64)),
        (BASE.view(torch.uint8)[0, 3:5], (3, 5)),
    ],
)
def test_a_range_goes_from_the_first_element_to_the_end_of_the_last(tensor, expected):
    assert byte_range(tensor) == expected
