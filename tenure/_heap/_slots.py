"""What an object refers to, slot by slot, with the spelling of each slot.

The garbage collector says how many references there are and the readers only name them; so counting
the answers counts references. No code of the objects themselves runs: attributes are named as such,
past properties and ``__getattr__``; containers and their subclasses are read by the methods of the
builtins. A chain starts anew at a callable, because its own name says more than the way to it. A
frame that is running is never read here; `Roots` knows its variables.
"""

import functools
import gc
import threading
import types
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, cast

import torch

from tenure._torch.quiet import TENSOR_BASE

from ._reading import (
    array_class,
    class_attributes,
    instance_attributes,
    is_array,
    is_kind,
    is_of_library,
    mro_of,
    read_locals,
    referents_of,
    referents_of_array,
    type_name,
)
from ._words import (
    FAR,
    Reader,
    Slot,
    Step,
    Wanted,
    attribute,
    inside,
    items,
    module_attribute,
    nothing,
    spell_key,
    variables,
)

_NAMED = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_CACHE: type = type(functools.lru_cache(len))

# of code that stands still, by the identity of its type: its name, and the attribute with its frame
_SUSPENDED = {
    id(types.GeneratorType): ("generator", "gi_frame"),
    id(types.CoroutineType): ("coroutine", "cr_frame"),
    id(types.AsyncGeneratorType): ("async generator", "ag_frame"),
}


def slots_of(holder: object, wanted: Wanted) -> Iterator[tuple[int, Step]]:
    """Yield every reference from one object to any of the wanted ones.

    Args:
        holder: any object.
        wanted: identities of the objects that matter.

    Yields:
        The identity of what is referred to and how; "(inside a …)" where no reader has a name.
    """
    left = Counter(key for key in map(id, referents_of(holder)) if key in wanted)
    for value, step in _named_slots(holder, left):
        if left[id(value)] > 0:
            left[id(value)] -= 1
            yield id(value), step
    unnamed = inside(type_name(type(holder)))
    for key in left.elements():
        yield key, unnamed


def _named_slots(holder: object, wanted: Wanted) -> Iterator[Slot]:
    if wanted and is_array(holder):
        yield from _array_slots(holder)
    for cls in mro_of(type(holder)) if wanted else ():
        reader = _READERS.get(id(cls))
        # an object that is being built or torn down may lack what its type promises
        try:
            yield from reader(holder, wanted) if reader else ()
        except (AttributeError, RuntimeError, ValueError):
            continue


# --- instances, classes, tensors


def _instance_slots(holder: object, wanted: Wanted) -> Iterator[Slot]:
    is_module = is_kind(type(holder), torch.nn.Module)
    module = type_name(type(holder)) if is_module else ""
    namer = module_attribute if is_module else attribute
    attributes = instance_attributes(holder)
    yield attributes, Step("", "attribute", namer=namer, module=module)
    for name, value in list(attributes.items()):
        if id(value) in wanted:
            text, following = namer(name)
            yield value, Step(text, "attribute", namer=following, module=module)
    for cls in mro_of(type(holder)):
        for name, descriptor in class_attributes(cls).items():
            if type(descriptor) is types.MemberDescriptorType:
                try:
                    yield descriptor.__get__(holder), Step(f".{name}", "attribute")
                # a slot that was never set
                except AttributeError:
                    continue


def _dicts_of(step: Step, holder: object, wanted: Wanted) -> Iterator[Slot]:
    """Return the dictionaries of a class or a `threading.local`, which only the collector shows."""
    return ((held, step) for held in gc.get_referents(holder) if type(held) is dict)


def _tensor_slots(holder: torch.Tensor, wanted: Wanted) -> Iterator[Slot]:
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks", "grad_fn"):
        yield getattr(TENSOR_BASE, name).__get__(holder), Step(f".{name}", "attribute")


# --- containers


def _item_slots(cls: Any, holder: object, wanted: Wanted) -> Iterator[Slot]:
    return _numbered(cls.__iter__(holder), wanted)


def _tuple_slots(holder: tuple[object, ...], wanted: Wanted) -> Iterator[Slot]:
    # The collector shows a tuple that C code is still filling, as of `f(*generator)`, and to read
    # an empty place of it ends the process. It visits what is there, the last first.
    found = gc.get_referents(holder)
    is_whole = len(found) == tuple.__len__(holder)
    values = tuple.__iter__(holder) if is_whole else reversed(found)
    return _numbered(values, wanted, frozen=True)


def _array_slots(holder: Any) -> Iterator[Slot]:
    cls: Any = array_class()
    base = cls.base.__get__(holder)
    for index, value in enumerate(referents_of_array(holder)):
        yield value, Step(".base" if value is base else f".flat[{index}]")


def _numbered(values: Iterable[object], wanted: Wanted, *, frozen: bool = False) -> Iterator[Slot]:
    for index, value in enumerate(list(values)):
        if id(value) in wanted:
            yield value, Step(f"[{index}]", key=index, frozen=frozen)


def _member_slots(cls: Any, holder: object, wanted: Wanted) -> Iterator[Slot]:
    return ((value, Step(" (a member)")) for value in list(cls.__iter__(holder)))


def _dict_slots(holder: dict[object, object], wanted: Wanted) -> Iterator[Slot]:
    for key, value in list(dict.items(holder)):
        if id(value) in wanted:
            name = spell_key(key)
            yield value, Step(f"[{name}]", key=key if type(key) is str else name)
        if id(key) in wanted:
            yield key, Step(" (a key)")


# --- functions and what wraps them


def _function_slots(holder: types.FunctionType, wanted: Wanted) -> Iterator[Slot]:
    code, name = holder.__code__, holder.__qualname__
    first = code.co_argcount - len(holder.__defaults__ or ())
    names = code.co_varnames[first : code.co_argcount]
    for value, kind, namer in (
        (holder.__closure__, "closure", variables(code.co_freevars)),
        (holder.__defaults__, "default", variables(names)),
        (holder.__kwdefaults__, "default", variables(())),
    ):
        yield value, Step("", kind, anchor=f"{kind} of {name}", namer=namer)


def _cell_slots(holder: types.CellType, wanted: Wanted) -> Iterator[Slot]:
    yield holder.cell_contents, Step("", "closure")


def _method_slots(
    holder: types.MethodType | types.BuiltinMethodType, wanted: Wanted
) -> Iterator[Slot]:
    of_self = holder.__self__
    anchor = type_name(type(of_self))
    yield of_self, Step("", "method", anchor=anchor, link=", held by the bound method ")


def _partial_slots(holder: "functools.partial[object]", wanted: Wanted) -> Iterator[Slot]:
    # past the attributes of a subclass
    read: Any = functools.partial
    func = read.func.__get__(holder)
    anchor = f"partial of {_name_of(func)}"
    yield func, Step(": func", "partial", anchor=anchor)
    for name in ("args", "keywords"):
        value = getattr(read, name).__get__(holder)
        yield value, Step("", "partial", anchor=anchor, namer=items(name))


def _cache_slots(holder: object, wanted: Wanted) -> Iterator[Slot]:
    wrapped = object.__getattribute__(holder, "__wrapped__")
    step = Step("", "cache", anchor=f"lru_cache of {_name_of(wrapped)}")
    return ((value, step) for value in gc.get_referents(holder) if value is not wrapped)


def _name_of(func: Any) -> str:
    return str(func.__qualname__) if is_kind(type(func), *_NAMED) else type_name(type(func))


# --- code that stands still


def frame_of(holder: object) -> types.FrameType | None:
    """Return the frame of an unfinished generator or coroutine; None for anything else."""
    _, name = _SUSPENDED.get(id(type(holder)), ("", ""))
    return cast("types.FrameType | None", getattr(holder, name)) if name else None


def _suspended_slots(holder: Any, wanted: Wanted) -> Iterator[Slot]:
    anchor = f"{_SUSPENDED[id(type(holder))][0]} {holder.__qualname__}"
    for value, name in _variables(holder, frame_of(holder), wanted):
        text = f": local {name}" if name else ": a value in flight"
        yield value, Step(text, "generator", anchor=anchor)


def _frame_slots(holder: types.FrameType, wanted: Wanted) -> Iterator[Slot]:
    """Local variables of a frame that outlived its call."""
    function = holder.f_code.co_qualname
    # a variable of torch's that still runs says more than one whose function an error has ended
    cost = 2 * FAR if is_of_library(holder) else 1
    yield holder.f_back, Step("", "traceback")
    for value, name in _variables(holder, holder, wanted):
        if type(value) is dict and name is None:
            # the snapshot of the variables that reading `f_locals` left in the frame
            namer = variables((), "local ")
            yield value, Step(f" in {function}()", "traceback", namer=namer, cost=cost)
        else:
            yield value, Step(f" in {function}(): local {name}", "traceback", cost=cost)


def _traceback_slots(holder: types.TracebackType, wanted: Wanted) -> Iterator[Slot]:
    yield holder.tb_frame, Step("", "traceback")
    yield holder.tb_next, Step("", "traceback")


def _exception_slots(holder: BaseException, wanted: Wanted) -> Iterator[Slot]:
    step = Step("", "traceback", anchor=f"traceback of {type_name(type(holder))}")
    # past the attributes of a subclass
    own = BaseException.__dict__
    yield own["__traceback__"].__get__(holder), step
    for name in ("__cause__", "__context__"):
        yield own[name].__get__(holder), Step("", "traceback")


def _variables(
    holder: object, frame: types.FrameType | None, wanted: Wanted
) -> Iterator[tuple[object, str | None]]:
    """Yield the values of variables with their names; a captured one is in its cell."""
    if frame is None:
        return
    names = {id(value): name for name, value in read_locals(frame)}
    for value in gc.get_referents(holder):
        if id(value) in wanted:
            contents = value.cell_contents if type(value) is types.CellType else value
            yield value, names.get(id(contents))


_READERS_OF_CLASSES: tuple[tuple[type, Reader], ...] = (
    (list, partial(_item_slots, list)),
    (deque, partial(_item_slots, deque)),
    (tuple, _tuple_slots),
    (set, partial(_member_slots, set)),
    (frozenset, partial(_member_slots, frozenset)),
    (dict, _dict_slots),
    (object, _instance_slots),
    (type, partial(_dicts_of, Step("", "attribute", namer=attribute))),
    (threading.local, partial(_dicts_of, Step("", "thread", namer=nothing))),
    (torch.Tensor, _tensor_slots),
    (types.FunctionType, _function_slots),
    (types.CellType, _cell_slots),
    (types.MethodType, _method_slots),
    (types.BuiltinMethodType, _method_slots),
    (functools.partial, _partial_slots),
    (_CACHE, _cache_slots),
    (types.GeneratorType, _suspended_slots),
    (types.CoroutineType, _suspended_slots),
    (types.AsyncGeneratorType, _suspended_slots),
    (types.FrameType, _frame_slots),
    (types.TracebackType, _traceback_slots),
    (BaseException, _exception_slots),
)
# by identity: a metaclass may define __hash__ and __eq__
_READERS: dict[int, Reader] = {id(cls): reader for cls, reader in _READERS_OF_CLASSES}
