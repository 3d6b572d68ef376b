"""What `Module.to` calls, with the device of Python as with CUDA: `.data = other`, `tensor.to`.

With the first, parameters stay the same objects and tied weights stay tied; torch refuses it for
PrivateUse1. A gradient follows its tensor, because torch lets Python set none of another device.
`tensor.to("sim")` means the current device, where torch asks a guard that knows one device only;
`torch.tensor(..., device="sim")` asks that guard too and stays with `sim:0`.
"""

import functools
from typing import Any

import torch

from tenure._torch.autograd import give_hooks, hooks_of, post_hooks_of
from tenure._torch.python_backend import needed, replace
from tenure._torch.swap import swap

from .._device._blocks import is_on_device
from .._device._which import index_of
from .._torch_backend import DEVICE_TYPE, sim_device

# What `Module.to` asks before it sets `.data`.
_CHECK = "torch._has_compatible_shallow_copy_type"
_plain_check = needed(_CHECK)


def install() -> None:
    """Replace the setter of `Tensor.data` and the check that `Module.to` makes before it."""
    torch.Tensor.data = _data_property()
    replace(_CHECK, _compatibility(_plain_check))


@functools.cache
def install_current_index() -> None:
    """Replace `Tensor.to`; the first start with several devices does."""
    torch.Tensor.to = _with_index(torch.Tensor.to)  # type: ignore[method-assign]
    # Parameters and buffers of a lazy module let pass what is in this list, which they share.
    lazy: Any = torch.nn.UninitializedParameter
    lazy._allowed_methods.append(torch.Tensor.to)


def _compatibility(plain: Any) -> Any:
    def compatible(input: torch.Tensor, from_: torch.Tensor) -> bool:
        return _crosses(input, from_) or bool(plain(input, from_))

    return compatible


def _data_property() -> Any:
    # A property, which the stubs give the type of what a tensor has there.
    plain: Any = torch.Tensor.data

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
    hooks = hooks_of(tensor), post_hooks_of(tensor)
    give_hooks(tensor, None, None)
    swap(tensor, twin)
    give_hooks(tensor, *hooks)
    if grad is not None:
        if _crosses(grad, tensor):
            _move(grad, grad.to(tensor.device))
        tensor.grad = grad


def _with_index(plain: Any) -> Any:
    @functools.wraps(plain)
    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs:
            kwargs["device"] = _resolved(kwargs["device"])
        moved: torch.Tensor = plain(tensor, *map(_resolved, args), **kwargs)
        return moved

    return to


def _resolved(value: Any) -> Any:
    if not isinstance(value, (str, torch.device)):
        return value
    asked = torch.device(value)
    is_open = asked.type == DEVICE_TYPE and asked.index is None
    return sim_device(index_of(None)) if is_open else value
