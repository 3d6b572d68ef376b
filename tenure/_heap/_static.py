"""Reading objects without running code of theirs.

Whatever is looked up goes through descriptors of ``type`` and of the interpreter, past metaclasses,
properties, ``__getattr__`` and ``__class__``.
"""

import sys
import types
from typing import cast

_QUALNAME = type.__dict__["__qualname__"].__get__
_MODULE = type.__dict__["__module__"].__get__
_MRO = type.__dict__["__mro__"].__get__
_NAMESPACE = type.__dict__["__dict__"].__get__


def type_name(cls: type) -> str:
    """The qualified name of a class."""
    return str(_QUALNAME(cls))


def module_name(cls: type) -> str:
    """The module that a class says it is from; empty where it says something odd."""
    name = _MODULE(cls)
    return name if type(name) is str else ""


def mro_of(cls: type) -> tuple[type, ...]:
    """The method resolution order of a class."""
    return cast("tuple[type, ...]", _MRO(cls))


def class_attributes(cls: type) -> types.MappingProxyType[str, object]:
    """What the body of a class defines, without its bases."""
    return cast("types.MappingProxyType[str, object]", _NAMESPACE(cls))


def instance_attributes(holder: object) -> dict[str, object]:
    """The instance dictionary itself; an empty one for an object that has none."""
    for cls in mro_of(type(holder)):
        found = class_attributes(cls).get("__dict__")
        if type(found) is types.GetSetDescriptorType:
            return cast("dict[str, object]", found.__get__(holder))
    return {}


def is_kind(cls: type, *bases: type) -> bool:
    """Whether a class inherits from one of the bases by its order alone, whatever it claims."""
    return any(found is base for found in mro_of(cls) for base in bases)


def _count_of_variable() -> int:
    found = object()
    return sys.getrefcount(found)


# How much of an answer of `sys.getrefcount` is the asking: measured, as Pythons differ. Up to 3.13
# the argument is one reference more; from 3.14 on it borrows that of the variable of the running
# function, if one is asked about. So nothing else is, here and elsewhere.
OF_VARIABLE = _count_of_variable()
"""What it says of an object that the variable, which is asked about, alone holds."""
