"""The private names of torch that paging stands on still do what it takes them for."""

import pytest

from tenure.paging import _torch_aside, _torch_calls, _torch_holders, _torch_unseen


@pytest.mark.parametrize("module", [_torch_aside, _torch_calls, _torch_holders, _torch_unseen])
def test_the_self_test_passes(module):
    assert module.works()
