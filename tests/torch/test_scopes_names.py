"""The private names of torch that tenure stands on still do what it takes them for."""

import pytest
import torch

from tenure._torch import (
    allocator,
    backward,
    dynamo,
    graph_outputs,
    modes,
    pytree,
    swap,
    versions,
    workspaces,
)
from tenure.scopes import _newness


@pytest.mark.parametrize(
    "module",
    [
        allocator,
        backward,
        dynamo,
        graph_outputs,
        modes,
        pytree,
        swap,
        versions,
        workspaces,
    ],
)
def test_the_self_test_passes(module):
    assert module.works()


def test_a_new_tensor_is_told_from_a_gradient_by_its_reference_count():
    assert _newness.SOLE > 0


def test_removing_a_mode_that_is_not_there_changes_nothing():
    mode, other = torch.overrides.BaseTorchFunctionMode(), torch.overrides.BaseTorchFunctionMode()
    with other:
        modes.remove(mode)
        assert modes.is_active(other)
    assert torch._C._len_torch_function_stack() == 0
