"""The private names of torch that tenure stands on still do what it takes them for."""

import pytest
import torch

from tenure import (
    _torch_allocator,
    _torch_backward,
    _torch_dynamo,
    _torch_pytree,
    _torch_versions,
    _torch_workspaces,
)
from tenure.scopes import (
    _newness,
    _torch_graph_outputs,
    _torch_modes,
    _torch_swap,
)


@pytest.mark.parametrize(
    "module",
    [
        _torch_allocator,
        _torch_backward,
        _torch_dynamo,
        _torch_graph_outputs,
        _torch_modes,
        _torch_pytree,
        _torch_swap,
        _torch_versions,
        _torch_workspaces,
    ],
)
def test_the_self_test_passes(module):
    assert module.works()


def test_a_new_tensor_is_told_from_a_gradient_by_its_reference_count():
    assert _newness.SOLE > 0


def test_removing_a_mode_that_is_not_there_changes_nothing():
    mode, other = torch.overrides.BaseTorchFunctionMode(), torch.overrides.BaseTorchFunctionMode()
    with other:
        _torch_modes.remove(mode)
        assert _torch_modes.is_active(other)
    assert torch._C._len_torch_function_stack() == 0
