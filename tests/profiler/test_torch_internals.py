"""The private names of torch that the profiler stands on still do what it takes them for."""

import pytest

from tenure.profiler import _torch_quiet


@pytest.mark.parametrize("module", [_torch_quiet])
def test_the_self_test_passes(module):
    assert module.works()
