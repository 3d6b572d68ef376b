"""What a handle is while its bytes are away: the same object, of a class that refuses every use.

Only what the handle itself knows (shape, dtype, device, gradient and the like) can be asked. The
class goes back to what it was when the bytes are back, at the next use at the latest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from tenure._errors import AwayTensorError
from tenure._refusals import handles_in, operation_of
from tenure._text import describe, shape_of

if TYPE_CHECKING:
    from ._moved import Moved

_GUARD = "_tenure_away"
_ADVICE = (
    "Leave the block of the Courtesy, or call restore() on it (the attribute courtesy of this "
    "error), before it is used."
)
_GRADIENT: Any = Tensor.grad
_set_class = vars(object)["__class__"].__set__  # past a __setattr__ of the subclass
_READABLE_PROPERTIES = (
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "retains_grad",
    "grad_fn", "output_nr", "_version", "_base", "nbytes", "itemsize",
    "is_cuda", "is_cpu", "is_xpu", "is_mps", "is_meta", "is_sparse", "is_sparse_csr",
    "is_quantized", "is_mkldnn", "is_nested", "_backward_hooks",
)  # fmt: skip
_READABLE_METHODS = (
    "size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "storage_offset",
    "is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_conj", "is_neg",
    "is_inference", "get_device", "__len__", "__dir__", "__hash__", "_is_view",
)  # fmt: skip


@dataclass(slots=True)
class Guard:
    """What is written on a handle whose bytes are away.

    Attributes:
        cls: the class that it has else.
        parts: its storage, or of a sparse tensor its storages.
    """

    cls: type[Tensor]
    parts: list[Moved]

    @property
    def is_away(self) -> bool:
        """Whether any of its bytes are not on the device."""
        return any(part.is_away for part in self.parts)


class AwayTensor(Tensor):
    """The class of a handle while its bytes are in host memory. Users never make one."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer what the handle knows, and refuse everything else until its bytes are back."""
        if func in _READABLE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        for tensor in handles_in((args, kwargs), AwayTensor):
            if not heal(tensor):
                refuse(tensor, operation_of(func))
        return func(*args, **(kwargs or {}))

    @property
    def _is_param(self) -> bool:  # type: ignore[override]  # torch declares it as an attribute
        """What ``isinstance(t, torch.nn.Parameter)`` asks."""
        guard = _guard_of(self)
        is_class = guard is not None and issubclass(guard.cls, Parameter)
        return is_class or bool(_attributes(self).get("_is_param"))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # untyped
        return repr(self) if heal(self) else f"<AwayTensor {_text_of(self)}>"

    def __str__(self) -> str:
        return repr(self)

    def __format__(self, spec: str) -> str:
        return format(self, spec) if heal(self) else repr(self)


def can_guard(tensor: Tensor) -> bool:
    """Whether the class of a handle can be exchanged; not for one with slots."""
    cls = type(tensor)
    try:
        _set_class(tensor, AwayTensor)
    except TypeError:
        return False
    _set_class(tensor, cls)
    return True


def guard(tensor: Tensor, part: Moved) -> None:
    """Let a handle refuse every use while ``part`` is away."""
    found = _guard_of(tensor)
    if found is not None:
        found.parts.append(part)
        return
    cls = type(tensor)
    _set_class(tensor, AwayTensor)
    _attributes(tensor)[_GUARD] = Guard(cls, [part])


def heal(tensor: Tensor) -> bool:
    """Give a handle its class back; False if its bytes are away still."""
    found = _guard_of(tensor)
    if found is None:
        return True
    if found.is_away:
        return False
    del _attributes(tensor)[_GUARD]
    _set_class(tensor, found.cls)
    return True


def refuse(tensor: Tensor, operation: str) -> NoReturn:
    """Raise the error that names ``operation`` and what ``tensor`` is.

    Raises:
        AwayTensorError: always.
    """
    found = _guard_of(tensor)
    assert found is not None
    courtesy = found.parts[0].courtesy
    raise AwayTensorError(f"{operation} got {_text_of(tensor)}. {_ADVICE}", courtesy)


def refuse_backward(node: str, part: Moved) -> NoReturn:
    """Raise the error for a node of a graph that saved what is away.

    Raises:
        AwayTensorError: always.
    """
    raise AwayTensorError(
        f"backward() came to {node}, which saved a tensor of {part.text} that a Courtesy moved to "
        f"host memory. {_ADVICE}",
        part.courtesy,
    )


def _guard_of(tensor: Tensor) -> Guard | None:
    if type(tensor) is not AwayTensor:
        return None
    found: Guard | None = _attributes(tensor).get(_GUARD)
    return found


def _attributes(tensor: Tensor) -> dict[str, Any]:
    attributes: dict[str, Any] = object.__getattribute__(tensor, "__dict__")
    return attributes


def _text_of(tensor: Tensor) -> str:
    found = _guard_of(tensor)
    n_bytes = sum(part.n_bytes for part in found.parts) if found else 0
    with torch._C.DisableTorchFunction():
        text = describe(tensor.dtype, shape_of(tensor), tensor.device, n_bytes)
    return f"{text}, which a Courtesy moved to host memory"


# the gradient can also be let go: that is what zero_grad() does
_READABLE = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in _READABLE_PROPERTIES),
        *(getattr(Tensor, name) for name in _READABLE_METHODS),
        _GRADIENT.__get__,
        _GRADIENT.__set__,
        _GRADIENT.__delete__,
    }
)
