"""Autocast for the device: which operators cast their arguments, and to what.

An operator on none of the lists runs on the types it is given. Casts of parameters are kept until
the outermost `autocast` closes, so that a weight used twice is cast once.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from .._device._blocks import is_on_device
from .._dispatch import register, register_fallback
from .._torch_backend import DEVICE_TYPE, below_autocast, operator_named
from ._autocast_lists import FLOAT32, FLOAT32_RESULT, LOWER, WIDEST

_KEY = "AutocastPrivateUse1"

# By id, with the parameter beside its cast: it is kept, so that no other object gets the id.
_parameter_casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


def install() -> None:
    """Register the casting kernels, and let everything else through."""
    register_fallback(torch.library.fallthrough_kernel, _KEY)
    kernels = {name: _casting(name, _lower_type) for name in LOWER}
    kernels |= {name: _casting(name, _float32) for name in FLOAT32}
    kernels |= {name: _casting(name, _float32_unless_given) for name in FLOAT32_RESULT}
    kernels |= {name: _casting(name, _widest_type) for name in WIDEST}
    kernels["binary_cross_entropy"] = _refuse_binary_cross_entropy
    register(kernels, _KEY)
    _forget_casts_with_autocast()


def _casting(name: str, choose: Callable[..., torch.dtype | None]) -> Callable[..., Any]:
    operator = operator_named(name)

    def run(*args: Any, **kwargs: Any) -> Any:
        with below_autocast():
            dtype = choose(args, kwargs)
            if dtype is not None:
                args, kwargs = _cast((args, kwargs), dtype)
            return operator(*args, **kwargs)

    return run


def _lower_type(args: Any, kwargs: Any) -> torch.dtype:
    return torch.get_autocast_dtype(DEVICE_TYPE)


def _float32(args: Any, kwargs: Any) -> torch.dtype:
    return torch.float32


def _float32_unless_given(args: Any, kwargs: Any) -> torch.dtype | None:
    return None if kwargs.get("dtype") is not None else torch.float32


def _widest_type(args: Any, kwargs: Any) -> torch.dtype | None:
    found: list[torch.dtype] = []
    tree_map_only(torch.Tensor, lambda t: found.append(t.dtype) if _eligible(t) else None, args)
    if not found:
        return None
    return torch.float32 if torch.float32 in found else _lower_type(args, kwargs)


def _eligible(tensor: torch.Tensor) -> bool:
    # As ATen's autocast_mode.h: doubles are never cast.
    is_single = tensor.is_floating_point() and tensor.dtype != torch.float64
    return is_on_device(tensor) and is_single


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        if not _eligible(tensor) or tensor.dtype == dtype:
            return tensor
        return _cast_parameter(tensor, dtype) if _is_kept(tensor, dtype) else tensor.to(dtype)

    return tree_map_only(torch.Tensor, cast, tree)


def _is_kept(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    is_parameter = tensor.is_leaf and tensor.requires_grad and tensor.dtype == torch.float32
    lowers = dtype == _lower_type((), {})
    return is_parameter and lowers and torch.is_autocast_cache_enabled()


def _cast_parameter(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if id(tensor) not in _parameter_casts:
        _parameter_casts[id(tensor)] = (tensor, tensor.to(dtype))
    return _parameter_casts[id(tensor)][1]


def _forget_casts_with_autocast() -> None:
    # The end of the outermost block calls this function of torch's, whatever the device.
    plain = torch.clear_autocast_cache

    def clear_autocast_cache() -> None:
        _parameter_casts.clear()
        plain()

    torch.clear_autocast_cache = clear_autocast_cache


def _refuse_binary_cross_entropy(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast."
        " Use binary_cross_entropy_with_logits or BCEWithLogitsLoss."
    )
