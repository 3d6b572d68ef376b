"""`parameter.data = other` across devices, which torch allows for CUDA and refuses for PrivateUse1.

`Module.to` depends on it: with it, parameters stay the same objects and tied weights stay tied. A
gradient follows its tensor, because torch lets Python set none of another device.
"""

from typing import Any

import torch

from .._device._blocks import is_on_device
from .._torch_backend import swap_implementation

# What `Module.to` asks before it sets `.data`.
_CHECK = "_has_compatible_shallow_copy_type"


def install() -> None:
    """Replace the setter of `Tensor.data` and the check that `Module.to` makes before it."""
    torch.Tensor.data = _data_property()
    setattr(torch, _CHECK, _compatibility())


def _compatibility() -> Any:
    plain: Any = getattr(torch, _CHECK)

    def compatible(input: torch.Tensor, from_: torch.Tensor) -> bool:
        return _crosses(input, from_) or bool(plain(input, from_))

    return compatible


def _data_property() -> Any:
    plain: Any = torch.Tensor.data  # typed as what a tensor's is

    def set_data(tensor: torch.Tensor, other: torch.Tensor) -> None:
        if isinstance(other, torch.Tensor) and _crosses(tensor, other):
            _move(tensor, other)
        else:
            plain.__set__(tensor, other)

    return property(plain.__get__, set_data)


def _crosses(first: torch.Tensor, second: torch.Tensor) -> bool:
    pair = {first.device.type, second.device.type}
    return is_on_device(first) != is_on_device(second) and "meta" not in pair


def _move(tensor: torch.Tensor, other: torch.Tensor) -> None:
    grad, tensor.grad = tensor.grad, None
    twin = other.detach().requires_grad_(tensor.requires_grad)
    hooks = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    tensor._backward_hooks = None
    tensor._post_accumulate_grad_hooks = None  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]
    swap_implementation(tensor, twin)
    tensor._backward_hooks, tensor._post_accumulate_grad_hooks = hooks
    if grad is not None:
        if _crosses(grad, tensor):
            _move(grad, grad.to(tensor.device))
        tensor.grad = grad
