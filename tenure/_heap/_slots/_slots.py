"""What an object refers to, slot by slot, with the spelling of each slot.

The garbage collector says how many references there are and the readers only name them; so counting
the answers counts references. No code of the objects themselves runs.
"""

import contextvars
import functools
import threading
import types
from collections import Counter, deque
from collections.abc import Iterator

import torch

from .._static import module_name, mro_of, type_name
from .._words import Reader, Slot, Step, Wanted, inside
from . import _arrays, _callables, _objects, _suspended


def slots_of(holder: object, wanted: Wanted) -> Iterator[tuple[int, Step]]:
    """Every reference from one object to any of the wanted ones.

    Args:
        holder: any object that the collector tracks, or an array of NumPy.
        wanted: identities of the objects that matter.

    Yields:
        The identity of what is referred to and how; "(inside a …)" where no reader has a name.
    """
    left = Counter(key for key in map(id, _arrays.referents_of(holder)) if key in wanted)
    for value, step in _named_slots(holder, left):
        if left[id(value)] > 0:
            left[id(value)] -= 1
            yield id(value), step
    unnamed = inside(type_name(type(holder)))
    for key in left.elements():
        yield key, unnamed


def _named_slots(holder: object, wanted: Wanted) -> Iterator[Slot]:
    if not wanted:
        return
    for cls in mro_of(type(holder)):
        reader = _READERS.get(id(cls)) or _LATE_READERS.get(f"{module_name(cls)}.{type_name(cls)}")
        # an object that is being built or torn down may lack what its type promises
        try:
            yield from reader(holder, wanted) if reader else ()
        except (AttributeError, RuntimeError, ValueError):
            continue


# by identity: a metaclass may define __hash__ and __eq__
_READERS: dict[int, Reader] = {
    id(cls): reader
    for cls, reader in (
        (list, _objects.list_slots),
        (tuple, _objects.tuple_slots),
        (deque, _objects.deque_slots),
        (set, _objects.set_slots),
        (frozenset, _objects.frozenset_slots),
        (dict, _objects.dict_slots),
        (object, _objects.instance_slots),
        (type, _objects.class_slots),
        (threading.local, _objects.thread_local_slots),
        (torch.Tensor, _objects.tensor_slots),
        (types.FunctionType, _callables.function_slots),
        (types.CellType, _callables.cell_slots),
        (types.MappingProxyType, _objects.proxy_slots),
        (types.MethodType, _callables.method_slots),
        (types.BuiltinMethodType, _callables.method_slots),
        (functools.partial, _callables.partial_slots),
        (type(functools.lru_cache(len)), _callables.cache_slots),
        (types.GeneratorType, _suspended.suspended_slots),
        (types.CoroutineType, _suspended.suspended_slots),
        (types.AsyncGeneratorType, _suspended.suspended_slots),
        (types.FrameType, _suspended.frame_slots),
        (types.TracebackType, _suspended.traceback_slots),
        (BaseException, _suspended.exception_slots),
        (contextvars.ContextVar, _suspended.variable_slots),
        (contextvars.Token, _suspended.token_slots),
        (contextvars.Context, _suspended.branch_slots),
    )
}

# of the interpreter's own classes without a public name; of libraries that may come later, or never
_LATE_READERS: dict[str, Reader] = {
    "builtins.hamt": _suspended.branch_slots,
    "builtins.hamt_array_node": _suspended.branch_slots,
    "builtins.hamt_bitmap_node": _suspended.leaf_slots,
    "builtins.hamt_collision_node": _suspended.leaf_slots,
    "_asyncio.Future": _suspended.future_slots,
    "_asyncio.Task": _suspended.task_slots,
    "numpy.ndarray": _arrays.array_slots,
    "pandas.core.generic.NDFrame": _arrays.table_slots,
    "pandas.core.internals.managers.BaseBlockManager": _arrays.manager_slots,
    "pandas.core.internals.blocks.Block": _arrays.block_slots,
}
