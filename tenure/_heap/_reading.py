"""Reading objects, tensors and frames without running code of theirs, and without leaving a trace.

Whatever is looked up goes through descriptors of ``type`` and of the interpreter, past metaclasses,
properties, ``__getattr__`` and ``__class__``. No question to a tensor runs an operation or raises.
A frame's ``f_locals`` snapshot, which would prolong the life of what it shows, is emptied again
unless somebody else holds it.
"""

import ctypes
import gc
import inspect
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import compress, count, repeat
from operator import call
from types import FrameType
from typing import Any, cast

import torch

from tenure._callers import is_internal, is_standard, is_tenure
from tenure._errors import MissingTorchNameError
from tenure._storages import storage_of
from tenure._torch.counting import OF_CPP, SOLE
from tenure._torch.quiet import TENSOR_BASE
from tenure._torch.storages import owners_of_storage, uses_of_tensor

_QUALNAME = type.__dict__["__qualname__"].__get__
_MRO = type.__dict__["__mro__"].__get__
_IS_SUBCLASS = type.__subclasscheck__
_NAMESPACE = type.__dict__["__dict__"].__get__
# references to a snapshot that only its frame, our variable and the argument of getrefcount hold
_UNSHARED = 3


def type_name(cls: type) -> str:
    """Return the qualified name of a class."""
    return str(_QUALNAME(cls))


def mro_of(cls: type) -> tuple[type, ...]:
    """Return the method resolution order of a class."""
    return cast("tuple[type, ...]", _MRO(cls))


def class_attributes(cls: type) -> types.MappingProxyType[str, object]:
    """Return the attributes that the body of a class defines, without its bases."""
    return cast("types.MappingProxyType[str, object]", _NAMESPACE(cls))


def instance_attributes(holder: object) -> dict[str, object]:
    """Return the instance dictionary itself; an empty one for an object that has none."""
    for cls in mro_of(type(holder)):
        found: Any = class_attributes(cls).get("__dict__")
        # a member of a SimpleNamespace; that of a Python module has its variables
        is_member = type(found) is types.MemberDescriptorType and cls is not types.ModuleType
        if is_member or type(found) is types.GetSetDescriptorType:
            return cast("dict[str, object]", found.__get__(holder))
    return {}


def is_kind(cls: type, *bases: type) -> bool:
    """Return whether the MRO of a class has one of the bases, whatever the class claims."""
    # in C, past a metaclass
    return any(map(_IS_SUBCLASS, bases, repeat(cls)))


# --- references
#
# `sys.getrefcount` also counts the reference of its own argument: always up to Python 3.13, from
# 3.14 on only if no variable has the object. So every count is compared with one that was measured
# of an object that was passed in the same way.


def _counts_of_items(held: list[Any]) -> Iterator[int]:
    return map(sys.getrefcount, held)


(_OF_ITEM,) = _counts_of_items([object()])


def references_beside(held: list[Any]) -> list[int]:
    """Count the references to each item of a list, without that of the list."""
    return [count - _OF_ITEM for count in _counts_of_items(held)]


def callers_keep_arguments() -> bool:
    """Return whether who calls a function holds its arguments until it returns, which has no name.

    Else they are handed over. It is so while torch.compile evaluates the frames of the process:
    after an error while it compiled, for good.
    """
    return _count_of_argument(object()) > SOLE


def _count_of_argument(argument: object) -> int:
    return sys.getrefcount(argument)


# --- arrays of NumPy, which is never imported here: the collector sees nothing that they hold


def array_class() -> type | None:
    """Return the class of arrays; None if NumPy is not in the process, or still on its way."""
    found: type | None = getattr(sys.modules.get("numpy"), "ndarray", None)
    return found


def is_array(found: object) -> bool:
    """Return whether an object is an array, of a subclass too."""
    cls = array_class()
    return cls is not None and is_kind(type(found), cls)


def referents_of(*holders: object) -> list[object]:
    """Return what objects refer to, as often as they do."""
    held: list[object] = gc.get_referents(*holders)
    for array in filter(is_array, holders):
        held += referents_of_array(array)
    return held


def referents_of_array(array: Any) -> list[object]:
    """Return the objects in an array, but for those in named fields; or the array that has them."""
    # past what a subclass defines
    cls: Any = array_class()
    base, dtype = cls.base.__get__(array), cls.dtype.__get__(array)
    if not dtype.hasobject:
        return []
    if is_array(base):
        return [base]
    found: list[object] = cls.tolist(cls.reshape(array, -1)) if dtype.names is None else []
    return found


# --- tensors


def cpp_references(found: object) -> int:
    """Return the references to a handle that only C++ knows; 0 for objects that are no tensor."""
    is_in_cpp = is_kind(type(found), torch.Tensor) and cpp_uses(found) > 1  # type: ignore[arg-type]
    return OF_CPP if is_in_cpp else 0


def read(t: torch.Tensor, name: str) -> Any:
    """Return an attribute as the base class has it; None where this kind of tensor has none."""
    # undefined, sparse, nested, fake and functorch tensors raise errors of many types here
    try:
        return _reader(name)(t)
    except Exception:
        return None


@cache
def _reader(name: str) -> Callable[[torch.Tensor], Any]:
    reader: Callable[[torch.Tensor], Any] = getattr(TENSOR_BASE, name).__get__
    return reader


def gradient_of(t: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient; None for a tensor that gets none, of which reading it warns."""
    gradient: torch.Tensor | None = None
    if read(t, "is_leaf") or read(t, "retains_grad"):
        gradient = read(t, "grad")
    return gradient


def storage_uses(t: torch.Tensor) -> int:
    """Return how many tensors and other owners share the storage, this tensor among them."""
    storage = storage_of(t)
    return 1 if storage is None else owners_of_storage(storage)


def cpp_uses(t: torch.Tensor) -> int:
    """Return how many owners the tensor has in C++, its Python handle among them."""
    try:
        return uses_of_tensor(t)
    except MissingTorchNameError:
        raise
    except Exception:
        return 1


# --- frames


def read_locals(frame: FrameType) -> list[tuple[str, object]]:
    """Names and values of a frame's local variables, leaving no snapshot behind."""
    snapshot = frame.f_locals
    if type(snapshot) is not dict:
        # from Python 3.13 a proxy; else what a metaclass prepared for the body of a class
        is_mapping = issubclass(type(snapshot), dict)
        return list(dict.items(snapshot) if is_mapping else snapshot.items())
    pairs = list(snapshot.items())
    if is_optimized(frame) and sys.getrefcount(snapshot) <= _UNSHARED:
        _forget(frame, snapshot)
    return pairs


def variables_of_stack(frame: FrameType | None) -> list[object]:
    """Return the values of variables from a frame outwards, then its globals; none of tenure's."""
    found: list[object] = []
    spaces: list[object] = []
    # walking on with the same variable: if it kept our own frame, that would be a cycle
    while frame is not None:
        if not is_tenure(frame):
            if frame.f_locals is not frame.f_globals:
                found += (value for _, value in read_locals(frame))
            spaces.append(frame.f_globals)
        frame = frame.f_back
    return found + spaces


def is_of_library(frame: FrameType) -> bool:
    """Return whether a frame runs code of tenure, of torch, or of what comes with Python."""
    return is_internal(frame) or is_standard(frame.f_code.co_filename)


def is_optimized(frame: FrameType) -> bool:
    """Return whether a frame is of a function, and not of a module or the body of a class."""
    return bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)


# --- the snapshot of a frame's variables, which Python below 3.13 keeps in the frame


if sys.version_info < (3, 13):
    # Source: https://github.com/python/cpython/blob/3.11/Objects/frameobject.c
    _write_back = ctypes.PYFUNCTYPE(None, ctypes.py_object, ctypes.c_int)(
        ("PyFrame_LocalsToFast", ctypes.pythonapi)
    )
# identities of snapshots, some of which are gone: another dictionary may have the same by now
_emptied: set[int] = set()


def _forget(frame: FrameType, snapshot: dict[str, object]) -> None:
    """Empty the snapshot of a frame of optimized code, which nobody else holds.

    The variables stand. A frame whose ``f_locals`` was read has a mark, upon which the interpreter
    takes the snapshot for the variables when a trace function of the frame returns: a missing name
    deletes its variable. `PyFrame_LocalsToFast` with 0 sets what the snapshot has, nothing once it
    is empty, deletes nothing, and takes the mark off.
    """
    _emptied.add(id(snapshot))
    steps: tuple[Callable[[], object], ...] = snapshot.clear, partial(_write_back, frame, 0)
    # in one call of C, so that no thread whose trace function returns comes in between
    deque(map(call, steps), maxlen=0)


def take_out_emptied(heap: list[Any]) -> None:
    """Take the emptied snapshots out of a list; what is gone since is no longer remembered."""
    positions = compress(count(), map(_emptied.__contains__, map(id, heap)))
    here = [position for position in positions if type(heap[position]) is dict]
    _emptied.intersection_update([id(heap[position]) for position in here])
    for position in reversed(here):
        if not heap[position]:
            del heap[position]
