"""The memory behind a tensor of any kind: the dense parts it is made of, and their storages.

No question asked here raises, whatever the tensor: what can't be told has no part.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn

from tenure._errors import MissingTorchNameError
from tenure._heap import is_kind, read
from tenure._storages import is_hollow, named_inner_tensors, sparse_parts, storage_of
from tenure._text import shape_of
from tenure._torch.storages import key_of

_PER_CHANNEL = (torch.per_channel_affine, torch.per_channel_affine_float_qparams)


class TensorPart(NamedTuple):
    """One storage that a tensor needs.

    Attributes:
        label: what it is to the tensor, such as ``.values``; empty for the tensor itself.
        tensor: the dense tensor over the storage.
        key: the identity of the storage while it lives.
        n_bytes: bytes of the whole storage.
    """

    label: str
    tensor: Tensor
    key: int
    n_bytes: int


def parts_of(t: Tensor) -> list[TensorPart]:
    """Return the parts of a tensor that take memory; none of meta, fake or hollow tensors."""
    # Nearly all tensors are, and for them there is nothing to search.
    if is_plain(t):
        part = _safely(_part, t)
        return [] if part is None else [part]
    found: list[TensorPart] = []
    seen: set[int] = set()
    waiting = [("", t)]
    while waiting:
        label, tensor = waiting.pop()
        if id(tensor) not in seen:
            seen.add(id(tensor))
            inside = _safely(_inside, tensor) or []
            waiting += [(label + name, inner) for name, inner in reversed(inside)]
            part = _safely(_part, tensor)
            if part is not None:
                found.append(part._replace(label=label))
    return found


def is_plain(t: Tensor) -> bool:
    """Return whether a tensor is made of nothing but its own storage."""
    if type(t) is not Tensor and type(t) is not nn.Parameter:
        return False
    # Asked after the class: a subclass may answer these with code of its own.
    return t.layout is torch.strided and not t.is_quantized


def identity_of(t: Tensor) -> weakref.ref[UntypedStorage] | None:
    """Return a weak reference to the storage: the same object as long as it is the same storage."""
    storage = storage_of(t)
    return None if storage is None else weakref.ref(storage)


def dtype_of(t: Tensor) -> torch.dtype:
    """Return the dtype, past any override of a subclass."""
    dtype: torch.dtype = read(t, "dtype")
    return dtype


def device_of(t: Tensor) -> torch.device:
    """Return the device, past any override; meta if the code of a subclass hides it."""
    device: torch.device | None = read(t, "device")
    return torch.device("meta") if device is None else device


def shape_or_empty(t: Tensor) -> tuple[int | str, ...]:
    """Return the shape, symbolic sizes as text; empty if the code of a subclass hides it."""
    return _safely(shape_of, t) or ()


def _safely(question: Callable[[Tensor], Any], t: Tensor) -> Any:
    # a subclass may raise anything from its own overrides, and a report must not
    try:
        return question(t)
    except MissingTorchNameError:
        raise
    except Exception:
        return None


def _inside(t: Tensor) -> list[tuple[str, Tensor]]:
    if parts := sparse_parts(t):
        return [(f".{name}", part) for name, part in parts]
    if t.is_quantized and t.qscheme() in _PER_CHANNEL:
        scales, zeros = t.q_per_channel_scales(), t.q_per_channel_zero_points()
        return [(".scales", scales), (".zero_points", zeros)]
    return [(f".{name}", inner) for name, inner in named_inner_tensors(t)]


def _part(t: Tensor) -> TensorPart | None:
    storage = storage_of(t)
    # also of sparse tensors, which are no more than the parts inside
    if storage is None:
        return _opaque(t)
    n_bytes = storage.nbytes()
    # A wrapper subclass shows sizes and has a storage that is none; its inner tensors have the
    # bytes.
    if not n_bytes or (not is_plain(t) and is_hollow(storage)) or device_of(t).type == "meta":
        return None
    return TensorPart("", t, key_of(storage), n_bytes)


def _opaque(t: Tensor) -> TensorPart | None:
    """Return the part of an opaque tensor: its elements are counted, and it shares nothing."""
    if is_kind(type(t), Tensor) and str(t.layout) == "torch._mkldnn":
        return TensorPart("", t, id(t), t.numel() * t.element_size())
    return None
