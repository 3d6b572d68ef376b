"""Writes that raise no version: who asks a weight for ``.data`` or an array may write it unseen.

Invariant: while a model is paged, what is asked so of the bytes of a page is noted there. Classes
are asked as before: only reading the attribute of a tensor passes here.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor

from tenure._errors import PagingError
from tenure._text import describe_tensor

from .aside import aside
from .lending import lent_to

_NAMES = ("data", "numpy", "__dlpack__")
_lock = threading.Lock()
_n_noting = 0
_before: dict[str, Any] = {}


def note_while(owner: object) -> weakref.finalize[[], object]:
    """Have it noted until what is returned is called, or its owner is gone."""
    global _n_noting
    with _lock:
        _n_noting += 1
        if _n_noting == 1:
            _install()
    return weakref.finalize(owner, _end)


def _end() -> None:
    global _n_noting
    with _lock:
        _n_noting -= 1
        if not _n_noting:
            _uninstall()


def _install() -> None:
    for name in _NAMES:
        original = getattr(Tensor, name)
        _before[name] = vars(Tensor).get(name)  # None where it is inherited
        kind = _NotingData if name == "data" else _Noting
        setattr(Tensor, name, kind(original))


def _uninstall() -> None:
    for name, own in _before.items():
        if own is None:
            delattr(Tensor, name)
        else:
            setattr(Tensor, name, own)
    _before.clear()


class _Noting:
    """An attribute of tensors as it was, of which pages learn when it is read."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __get__(self, tensor: Tensor | None, owner: Any = None) -> Any:
        if tensor is None:
            return self._original  # subclasses know the operations by these objects
        _note(tensor)
        return self._original.__get__(tensor, owner)


class _NotingData(_Noting):
    """The same of ``.data``, which can be set."""

    def __set__(self, tensor: Tensor, value: Tensor) -> None:
        with torch._C.DisableTorchFunction():
            lent = lent_to(tensor)
        name = None if lent is None else lent.tensors.get(id(tensor))
        if name is None:
            self._original.__set__(tensor, value)
        else:
            _fill(name, tensor, value)


def _note(tensor: Tensor) -> None:
    with torch._C.DisableTorchFunction():
        lent = lent_to(tensor)
    if lent is not None:
        lent.is_aliased = True


def _fill(name: str, shown: Tensor, value: Tensor) -> None:
    """Give a weight that is shown other values: what it lies in is the pager's."""
    if _form(value) != _form(shown):
        raise PagingError(
            f"{name!r} was given {describe_tensor(value)} through .data in the forward of a paged "
            f"model, where it is {describe_tensor(shown)}: that has no place there. Nothing was "
            "changed. Give it a tensor of the same shape, type and device, or unpage() first."
        )
    with aside():
        shown.copy_(value.clone())  # a copy first: it may be a view of the weight


def _form(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def works() -> bool:
    """Whether tensors can be asked in this way, and are as before when that ends."""
    before = [vars(Tensor).get(name) for name in _NAMES]
    value = torch.ones(2, device="cpu")
    end = note_while(value)
    seen = [value.data.tolist(), value.numpy().tolist(), Tensor.data.__get__(value).tolist()]  # type: ignore[attr-defined]
    end()
    return seen == [[1.0, 1.0]] * 3 and before == [vars(Tensor).get(name) for name in _NAMES]
