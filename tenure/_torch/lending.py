"""Bytes that are lent out in a storage of their own: whether they are held, and written unseen.

A variable, a view or a graph of autograd holds a tensor; what was made by `detach()`, `.data` or
NumPy holds no tensor of ours, but the storage that it lies in. Who asks a weight for ``.data`` or
for an array may write it without raising a version. The caching allocators ignore
``record_stream()`` of a storage that is not theirs, so the stream is noted here instead.

Source: ``recordStream`` of c10/cuda/CUDACachingAllocator.cpp.

While a model is paged, this patches ``Tensor.data``, ``.numpy``, ``.__dlpack__`` and
``.record_stream``; read from the class, all but the last are torch's own.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils.dlpack import from_dlpack

from tenure._errors import PagingError
from tenure._text import describe_tensor

from . import bound
from .patches import Patch
from .quiet import aside, without_functions
from .storages import byte_range, key_of, n_holders, n_uses

_to_dlpack = bound("torch._C._to_dlpack", "paging")
_lent: weakref.WeakValueDictionary[int, Lent] = weakref.WeakValueDictionary()


class Lent:
    """Some bytes of a plain uint8 tensor, in their own storage that keeps it alive.

    Args:
        memory: the tensor, which is contiguous.
        start: the first of the bytes.
        n_bytes: how many.
        lender: whose they are.

    Attributes:
        lender: as above.
        is_aliased: whether something was made of them that is written without raising a version.
        tensors: the tensors that show them and the name of each, by ``id``.
        aliases: what ``.data`` of one of these has given.
        streams: those that ``record_stream()`` said use them, by id.
    """

    def __init__(self, memory: Tensor, start: int, n_bytes: int, lender: object = None) -> None:
        self.lender = lender
        self._tensor = in_own_storage(memory, start, start + n_bytes)
        # in a dictionary, so that its references can be counted without a variable that adds one
        self._holder = {0: self._tensor.untyped_storage()}
        self._n_uses, self._n_holders = self._counts()
        self.is_aliased = False
        self.tensors: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self.aliases: list[weakref.ref[Tensor]] = []
        self.streams: dict[int, Any] = {}
        _lent[key_of(self._holder[0])] = self

    @property
    def storage(self) -> UntypedStorage:
        """The storage, to make tensors over it."""
        return self._holder[0]

    def show(self, tensor: Tensor, name: str) -> None:
        """Note that a tensor shows them."""
        # torch.utils.swap_tensors() refuses what has a weak reference, and nobody would see a swap.
        self.tensors[id(tensor)] = weakref.ref(tensor), name

    def live_aliases(self) -> list[Tensor]:
        """Return those aliases that lie there still, and that something holds."""
        found = [alias for known in self.aliases if (alias := known()) is not None]
        return [alias for alias in found if lent_to(alias) is self]

    def is_shared(self, n_tensors: int) -> bool:
        """Return whether more than so many tensors lie in the storage, or something holds it.

        Whatever shows its bytes counts: tensors of any class, arrays of NumPy, capsules.
        """
        n_uses, n_holders = self._counts()
        return n_uses > self._n_uses + n_tensors or n_holders > self._n_holders

    def _counts(self) -> tuple[int, int]:
        return n_uses(self._holder[0]), n_holders(self._holder, 0)


def in_own_storage(memory: Tensor, start: int, end: int) -> Tensor:
    """Return some bytes of a plain uint8 tensor, in their own storage that keeps it alive."""
    # By DLPack: a storage that is made from an address alone would outlive the memory.
    part: Tensor = from_dlpack(_to_dlpack(memory[start:end]))
    return part


def lent_to(tensor: Tensor) -> Lent | None:
    """Return the lent memory that a tensor lies in; None if it has no plain storage."""
    if not _lent:
        return None
    try:
        with without_functions():
            storage = tensor.untyped_storage()
    # wrapper subclasses, transforms, sparse ones
    except (RuntimeError, NotImplementedError):
        return None
    return _lent.get(key_of(storage))


def note_while(owner: object) -> weakref.finalize[[], object]:
    """Have it noted until what is returned is called, or its owner is gone."""
    return _noting.last_while(owner)


class _Noting:
    """An attribute of tensors as it was, of which pages learn when it is read."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __get__(self, tensor: Tensor | None, owner: Any = None) -> Any:
        if tensor is None:
            # subclasses know the operations by these objects
            return self._original
        lent = lent_to(tensor)
        if lent is not None:
            lent.is_aliased = True
        return self._original.__get__(tensor, owner)


class _NotingData(_Noting):
    """The same of ``.data``, which can be set."""

    def __get__(self, tensor: Tensor | None, owner: Any = None) -> Any:
        found = super().__get__(tensor, owner)
        lent = None if tensor is None else lent_to(found)
        if lent is not None:
            alive = [known for known in lent.aliases if known() is not None]
            lent.aliases = [*alive, weakref.ref(found)]
        return found

    def __set__(self, tensor: Tensor, value: Tensor) -> None:
        lent = lent_to(tensor)
        known = None if lent is None else lent.tensors.get(id(tensor))
        if lent is None or known is None:
            self._original.__set__(tensor, value)
        else:
            _, name = known
            _check_form(name, tensor, value)
            with aside():
                # It may be a view of the weight.
                values = value.clone()
                self._part_aliases(lent, name, tensor, value)
                tensor.copy_(values)

    def _part_aliases(self, lent: Lent, name: str, shown: Tensor, value: Tensor) -> None:
        """Give memory of their own to tensors that are to keep the values that a weight has.

        Raises:
            PagingError: something else would have the new ones.
        """
        low, high = byte_range(shown)
        for alias in lent.live_aliases():
            start, end = byte_range(alias)
            if start < high and low < end:
                self._original.__set__(alias, alias.clone())
        others = [*lent.live_aliases(), *([value] if lent_to(value) is lent else [])]
        lent.aliases = [weakref.ref(alias) for alias in others]
        if lent.is_shared(len(lent.tensors) + len({id(each) for each in others})):
            raise PagingError(
                f"{name!r} was given other values through .data in the forward of a paged model, "
                "while a view, an array or another tensor shows its memory, and would have them, "
                "too. Its values are as before. Write them with copy_(), or clone() what is kept."
            )


class _NotingStreams(_Noting):
    """``record_stream()``, also as ``Tensor.record_stream``: no subclass compares that function."""

    def __get__(self, tensor: Tensor | None, owner: Any = None) -> Any:
        return self._record if tensor is None else functools.partial(self._record, tensor)

    def _record(self, tensor: Tensor, stream: Any) -> None:
        lent = lent_to(tensor)
        if lent is None:
            self._original(tensor, stream)
        else:
            lent.streams[stream.stream_id] = stream


_KINDS: dict[str, type[_Noting]] = {
    "data": _NotingData,
    "numpy": _Noting,
    "__dlpack__": _Noting,
    "record_stream": _NotingStreams,
}
_noting = Patch(Tensor, _KINDS)


def _check_form(name: str, shown: Tensor, value: Tensor) -> None:
    if _form(value) != _form(shown):
        raise PagingError(
            f"{name!r} was given {describe_tensor(value)} through .data in the forward of a paged "
            f"model, where it is {describe_tensor(shown)}: that has no place there. Nothing was "
            "changed. Give it a tensor of the same shape, type and device, or unpage() first."
        )


def _form(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device
