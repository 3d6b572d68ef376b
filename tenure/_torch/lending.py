"""Bytes that are lent out in a storage of their own: whether they are held, and written unseen.

A variable, a view or a graph of autograd holds a tensor; what was made by `detach()`, `.data` or
NumPy holds no tensor of ours, but the storage that it lies in. Code that asks a weight for
``.data`` or an array, on the host as well, may write it without raising a version. The caching
allocators ignore ``record_stream()`` of a storage that is not theirs, so the stream is noted here.

Source: ``recordStream`` of c10/cuda/CUDACachingAllocator.cpp.

While a model is paged, this patches ``Tensor.data``, ``.numpy``, ``.__dlpack__``, ``.set_`` and
``.record_stream``; read from the class, all but the last are torch's own.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, NoReturn, Protocol

from torch import Tensor, UntypedStorage
from torch.utils.dlpack import from_dlpack

from tenure._errors import PagingError
from tenure._text import describe_tensor

from . import bound
from .patches import Patch
from .quiet import without_functions
from .storages import key_of, n_holders, n_uses

_to_dlpack = bound("torch._C._to_dlpack", "paging")
_watched: weakref.WeakValueDictionary[int, Watcher] = weakref.WeakValueDictionary()


class Watcher(Protocol):
    """What is told that memory may be written without raising a version."""

    is_aliased: bool


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
        self.streams: dict[int, Any] = {}
        watch(self.storage, self)

    @property
    def storage(self) -> UntypedStorage:
        """The storage, to make tensors over it."""
        return self._holder[0]

    def show(self, tensor: Tensor, name: str) -> None:
        """Note that a tensor shows them."""
        # torch.utils.swap_tensors() refuses what has a weak reference, and nobody would see a swap.
        self.tensors[id(tensor)] = weakref.ref(tensor), name

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


def watch(storage: UntypedStorage, watcher: Watcher) -> None:
    """Note it when code asks for ``.data`` or an array of a tensor that lies in a storage."""
    _watched[key_of(storage)] = watcher


def note_write(tensor: Tensor) -> None:
    """Note that code may write the memory of a tensor without raising a version."""
    watcher = _watcher_of(tensor)
    if watcher is not None:
        watcher.is_aliased = True


def lent_to(tensor: Tensor) -> Lent | None:
    """Return the lent memory that a tensor lies in; None if it has no plain storage."""
    watcher = _watcher_of(tensor)
    return watcher if isinstance(watcher, Lent) else None


def _watcher_of(tensor: Tensor) -> Watcher | None:
    if not _watched:
        return None
    try:
        with without_functions():
            storage = tensor.untyped_storage()
    # wrapper subclasses, transforms, sparse ones
    except (RuntimeError, NotImplementedError):
        return None
    return _watched.get(key_of(storage))


def form_of(tensor: Tensor) -> tuple[object, ...]:
    """Return the address of a tensor with all that says how its bytes are read there."""
    with without_functions():
        bits = tensor.is_conj(), tensor.is_neg()
        return tensor.dtype, tensor.data_ptr(), tensor.shape, tensor.stride(), bits


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
        note_write(tensor)
        return self._original.__get__(tensor, owner)


class _NotingData(_Noting):
    """The same of ``.data``, which can be set."""

    def __set__(self, tensor: Tensor, value: Tensor) -> None:
        name = _shown_name(tensor)
        if name is None:
            self._original.__set__(tensor, value)
        # as it is after ``weight.data += 1``
        elif lent_to(value) is not lent_to(tensor) or form_of(value) != form_of(tensor):
            given, has = describe_tensor(value), describe_tensor(tensor)
            _refuse(f"{name!r} was given {given} in the place of {has} through .data")


class _RefusingSet(_Noting):
    """``set_()``: a weight that lies in other memory would not be written back."""

    def __get__(self, tensor: Tensor | None, owner: Any = None) -> Any:
        # to look at it is no call, as hasattr() does
        return self._original if tensor is None else functools.partial(self._set, tensor)

    def _set(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        name = _shown_name(tensor)
        if name is not None:
            _refuse(f"set_() was called of {name!r}")
        return self._original(tensor, *args, **kwargs)


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
    "set_": _RefusingSet,
    "record_stream": _NotingStreams,
}
_noting = Patch(Tensor, _KINDS)


def _shown_name(tensor: Tensor) -> str | None:
    """Return the name of a tensor that shows lent bytes; None if it shows none."""
    lent = lent_to(tensor)
    known = None if lent is None else lent.tensors.get(id(tensor))
    return None if known is None else known[1]


def _refuse(deed: str) -> NoReturn:
    raise PagingError(
        f"{deed} in the forward of a paged model, where its memory is shared with others. Nothing "
        "was changed. Write the values with weight.data.copy_(values), or unpage() first."
    )
