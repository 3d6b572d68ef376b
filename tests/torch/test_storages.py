"""Who holds a tensor of a storage, and which bytes of it a tensor shows."""

import pytest
import torch
from torch import nn

from tenure._torch.storages import byte_range, is_held, key_of, shared_keys

BASE = torch.arange(24, dtype=torch.int32).view(4, 6)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_views_hold_a_tensor_in_every_mode(mode):
    holder = {0: nn.Parameter(torch.ones(2, 2), requires_grad=False)}
    with mode():
        view = holder[0].t()[0]
    assert is_held(holder, 0)
    del view
    assert not is_held(holder, 0)


def test_storages_that_were_shared_are_known():
    t = torch.ones(2)
    assert key_of(t.untyped_storage()) not in shared_keys()


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
