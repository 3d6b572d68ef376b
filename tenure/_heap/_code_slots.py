"""The slots of code: of functions and what wraps them, and of what stands still.

A chain starts anew at a callable, because its own name says more than the way to it. A frame that
is running is never read here; `RunningFrames` knows its variables.
"""

import functools
import gc
import types
from collections.abc import Iterator
from typing import Any, cast

import torch

from ._reading import class_attributes, is_kind, read_locals, type_name
from ._words import Namer, Slot, Step, Wanted, items, variables

_NAMED = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)

# the builtin type, its name in a chain, and the attribute that has its frame
_KINDS: tuple[tuple[type, str, str], ...] = (
    (types.GeneratorType, "generator", "gi_frame"),
    (types.CoroutineType, "coroutine", "cr_frame"),
    (types.AsyncGeneratorType, "async generator", "ag_frame"),
)


def function_slots(holder: types.FunctionType, wanted: Wanted) -> Iterator[Slot]:
    """Captured variables and defaults."""
    code, name = holder.__code__, holder.__qualname__
    yield holder.__closure__, _anchored("closure", name, variables(code.co_freevars))
    first = code.co_argcount - len(holder.__defaults__ or ())
    names = code.co_varnames[first : code.co_argcount]
    yield holder.__defaults__, _anchored("default", name, variables(names))
    yield holder.__kwdefaults__, _anchored("default", name, variables(()))


def cell_slots(holder: types.CellType, wanted: Wanted) -> Iterator[Slot]:
    """The value of a captured variable."""
    yield holder.cell_contents, Step("", "closure")


def method_slots(
    holder: types.MethodType | types.BuiltinMethodType, wanted: Wanted
) -> Iterator[Slot]:
    """The object that a method is bound to."""
    of_self = holder.__self__
    if is_kind(type(of_self), torch.Tensor):
        yield of_self, Step("", "method", anchor="bound method", link=" ")
    else:
        anchor = type_name(type(of_self))
        yield of_self, Step("", "method", anchor=anchor, link=", held by the bound method ")


def partial_slots(holder: "functools.partial[object]", wanted: Wanted) -> Iterator[Slot]:
    """Arguments and function of a `functools.partial`."""
    func, args, keywords = (
        class_attributes(functools.partial)[name].__get__(holder)  # type: ignore[attr-defined]
        for name in ("func", "args", "keywords")
    )
    anchor = f"partial of {_name_of(func)}"
    yield args, Step("", "partial", anchor=anchor, namer=items("args"))
    yield keywords, Step("", "partial", anchor=anchor, namer=items("keywords"))
    yield func, Step(": func", "partial", anchor=anchor)


def cache_slots(holder: object, wanted: Wanted) -> Iterator[Slot]:
    """Arguments and results that a `functools.lru_cache` remembers."""
    wrapped = object.__getattribute__(holder, "__wrapped__")
    step = Step("", "cache", anchor=f"lru_cache of {_name_of(wrapped)}")
    return ((value, step) for value in gc.get_referents(holder) if value is not wrapped)


def _anchored(kind: str, name: str, namer: Namer) -> Step:
    return Step("", kind, anchor=f"{kind} of {name}", namer=namer)


def _name_of(func: Any) -> str:
    return str(func.__qualname__) if is_kind(type(func), *_NAMED) else type_name(type(func))


# --- code that stands still


def frame_of(holder: object) -> types.FrameType | None:
    """The frame of a generator or coroutine that has not finished; None for anything else."""
    for cls, _, name in _KINDS:
        if type(holder) is cls:
            return cast("types.FrameType | None", getattr(holder, name))
    return None


def suspended_slots(holder: Any, wanted: Wanted) -> Iterator[Slot]:
    """Local variables of a suspended generator, coroutine or async generator."""
    kind = next(kind for cls, kind, _ in _KINDS if type(holder) is cls)
    anchor = f"{kind} {holder.__qualname__}"
    for value, name in _variables(holder, frame_of(holder), wanted):
        text = f": local {name}" if name else ": a value in flight"
        yield value, Step(text, "generator", anchor=anchor)


def frame_slots(holder: types.FrameType, wanted: Wanted) -> Iterator[Slot]:
    """Local variables of a frame that outlived its call."""
    function = holder.f_code.co_qualname
    yield holder.f_back, Step("", "traceback")
    for value, name in _variables(holder, holder, wanted):
        if type(value) is dict and name is None:
            # the snapshot of the variables that reading `f_locals` left in the frame
            yield value, Step(f" in {function}()", "traceback", namer=variables((), "local "))
        else:
            yield value, Step(f" in {function}(): local {name}", "traceback")


def traceback_slots(holder: types.TracebackType, wanted: Wanted) -> Iterator[Slot]:
    """The frame of a traceback and the traceback of what it called."""
    yield holder.tb_frame, Step("", "traceback")
    yield holder.tb_next, Step("", "traceback")


def exception_slots(holder: BaseException, wanted: Wanted) -> Iterator[Slot]:
    """The traceback of an exception, and the exceptions that it came from."""
    read = BaseException.__dict__
    name = type_name(type(holder))
    anchored = Step("", "traceback", anchor=f"traceback of {name}")
    yield read["__traceback__"].__get__(holder), anchored
    for attribute in ("__context__", "__cause__", "args"):
        yield read[attribute].__get__(holder), Step(f".{attribute}", "attribute")


def _variables(
    holder: object, frame: types.FrameType | None, wanted: Wanted
) -> Iterator[tuple[object, str | None]]:
    """What the holder refers to with the variable's name; a captured one is in its cell."""
    if frame is None:
        return
    names = {id(value): name for name, value in read_locals(frame)}
    for value in gc.get_referents(holder):
        if id(value) in wanted:
            contents = value.cell_contents if type(value) is types.CellType else value
            yield value, names.get(id(contents))
