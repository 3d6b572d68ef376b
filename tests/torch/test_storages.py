import pytest
import torch
from torch import nn

from tenure._torch.storages import is_held, key_of, shared_keys


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
