import torch

from tenure._torch import modes


def test_removing_a_mode_that_is_not_there_changes_nothing():
    mode, other = torch.overrides.BaseTorchFunctionMode(), torch.overrides.BaseTorchFunctionMode()
    with other:
        modes.remove(mode)
        assert modes.is_active(other)
    assert torch._C._len_torch_function_stack() == 0
