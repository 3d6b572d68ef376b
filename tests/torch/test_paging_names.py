"""The private names of torch that paging stands on still do what it takes them for."""

import pytest

from tenure._torch import aside, entry_calls, lending, unseen


@pytest.mark.parametrize("module", [aside, entry_calls, lending, unseen])
def test_the_self_test_passes(module):
    assert module.works()
