"""Tensors with data lend their handles to tensors without data for a while, and nothing is left.

Invariant: after the block each handle has the tensor, the class and the attributes that it had; no
value was written, and no gradient. Whoever holds a handle (a module, an optimizer, a closure) sees
the fake in the meantime, so that nothing has to be found but the tensors themselves.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType, ModuleType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from tenure._errors import PredictionError, TenureError
from tenure._heap import find_holders, instances, tracked_objects
from tenure._storages import inner_tensors
from tenure._text import describe_tensor, listed
from tenure._torch.autograd import carry_hooks_over, require_hooks
from tenure._torch.fakes import FakeTensor, fake_of, is_fake, mode_of
from tenure._torch.quiet import set_class, without_functions
from tenure._torch.sharding import is_dtensor
from tenure._torch.swap import swap
from tenure.scopes import dispose

from .._undo import Caches, ContainerNote, noted_container
from ._device import Target

_LEAVES = (Tensor, nn.Module, Optimizer)
_MOST_ITEMS = 100_000
"""In a container that is looked into: a data set is not."""


@contextmanager
def lent_to_fakes(
    tensors: Iterable[Tensor], mode: Any, target: Target
) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Return a block in which tensors have no data.

    Args:
        tensors: of any shape, dtype, layout and device.
        mode: a mode of `tenure._torch.fakes`; it is not entered here.
        target: where they appear.

    Yields:
        Pairs of a handle that shows a fake and one that has the real tensor in the meantime.
    """
    require_hooks()
    pairs: list[tuple[Tensor, Tensor]] = []
    with ExitStack() as back:
        with without_functions():
            torch.clear_autocast_cache()
            for tensor in tensors:
                if is_fake(tensor):
                    back.callback(restore_leaves, leaves_in([tensor]))
                else:
                    _check(tensor)
                    twin = fake_of(tensor, mode, target.place_of(tensor))
                    before = type(tensor), vars(tensor)
                    _lend(tensor, twin)
                    back.callback(_take_back, tensor, twin, *before)
                    pairs.append((tensor, twin))
        # autocast refers weakly to what it has cast, and nothing can be swapped then; it is a cache
        back.callback(torch.clear_autocast_cache)
        yield pairs


def _check(tensor: Tensor) -> None:
    """Refuse what no fake can stand for.

    Raises:
        PredictionError: it is a tensor of a class of its own, nested, or has a graph.
    """
    if is_lazy(tensor):
        what, advice = "has no shape yet", "Run the model once, so that its lazy modules are made"
    elif type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
        what = f"is a {type(tensor).__name__}, whose class has a way of its own with operations"
        advice = "Predict with plain tensors of the same sizes"
    elif tensor.is_nested:
        what, advice = "is nested, and has no one shape", "Predict with a padded tensor"
    elif not tensor.is_leaf:
        what = "comes of a computation from before, whose graph a prediction would run backward"
        advice = "Detach it, or compute it inside the function"
    else:
        return
    raise PredictionError(
        f"The memory of this work can't be predicted: a tensor that it uses {what}. {advice}."
    )


def _lend(handle: Any, twin: Any) -> None:
    cls, attributes = type(handle), {**handle.__dict__, **twin.__dict__}
    set_class(handle, FakeTensor)
    try:
        swap(handle, twin)
    except RuntimeError as error:
        set_class(handle, cls)
        if isinstance(error, TenureError):
            raise
        raise PredictionError(
            "The memory of this work can't be predicted: code in C++ refers weakly to a tensor of "
            f"shape {tuple(handle.shape)}, which can't be put aside for the time being. Let go of "
            "what came of it before, or predict with a copy."
        ) from error
    handle.__dict__ = attributes
    set_class(twin, cls)
    carry_hooks_over(handle)


def _take_back(handle: Any, twin: Any, cls: type[Tensor], attributes: dict[str, Any]) -> None:
    with without_functions():
        set_class(twin, FakeTensor)
        swap(handle, twin)
        set_class(handle, cls)
        handle.__dict__ = attributes


def leaves_in(tensors: Iterable[Tensor]) -> list[tuple[Tensor, bool, Tensor | None]]:
    """Return the leaves among some tensors, whether they require grad, and their gradients."""
    return [(each, each.requires_grad, each.grad) for each in tensors if each.is_leaf]


def restore_leaves(leaves: Iterable[tuple[Tensor, bool, Tensor | None]]) -> None:
    """Restore leaves that were not lent, as `leaves_in` returned them."""
    for leaf, requires_grad, gradient in leaves:
        if leaf.is_leaf:
            if leaf.requires_grad != requires_grad:
                leaf.requires_grad_(requires_grad)
            leaf.grad = gradient


def parts_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return tensors with data: parts instead of those that are shared, and of their gradients.

    Of a shared tensor each rank has a part, and the whole keeps its class: operations come to the
    class first, which does them with the parts, on every rank alone.
    """
    found: dict[int, Tensor] = {}
    for tensor in tensors:
        parts = [tensor]
        if is_dtensor(tensor):
            parts = inner_tensors(tensor)
            # that of a plain tensor is lent with it
            if tensor.is_leaf and tensor.grad is not None:
                parts += parts_of([tensor.grad])
        found |= {id(part): part for part in parts}
    return list(found.values())


# --- containers, and tensors without data that somebody keeps


def containers_below(values: Iterable[Any]) -> list[ContainerNote]:
    """Note the containers among some values, the attributes of the others, and all within them.

    What modules and optimizers within them hold is not noted. A container that is the same
    afterwards should not be touched, so that a thread that reads it, as one that calls a module, is
    not disturbed.

    Args:
        values: of a module, the attributes are also the parameters, modules and hooks that it has;
            of an optimizer, a schedule or a scaler all that it counts.
    """
    waiting: list[Any] = []
    for value in values:
        if not isinstance(value, Tensor | type | ModuleType | FunctionType):
            waiting += [value] if isinstance(value, dict | list | set | deque) else []
            waiting.append(getattr(value, "__dict__", None))
    notes: list[ContainerNote] = []
    # what is noted is kept, so an id stands for one object
    seen: dict[int, Any] = {}
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, _LEAVES):
            continue
        if issubclass(type(value), tuple):
            seen[id(value)] = value
            waiting += tuple.__iter__(value)
        elif (note := noted_container(value)) is not None:
            seen[id(value)] = value
            notes.append(note)
            if len(note.items) <= _MOST_ITEMS:
                waiting += note.items.values() if isinstance(note.items, dict) else note.items
    return notes


class FakesLeft:
    """The tensors without data that a prediction makes and somebody keeps.

    A prediction that leaves none costs no look at the heap.

    Args:
        mode: what makes them.
        objects: what the work uses.
        has_others: whether the mode has made some before.
    """

    def __init__(self, mode: Any, objects: Iterable[Any], *, has_others: bool) -> None:
        # each of its tensors holds it: once it is gone, so are they
        self._mode = ref(mode)
        self._others: dict[int, Tensor] = {}
        if has_others:
            self._others = {id(each): each for each in self._alive()}
        self._caches = Caches(objects)

    def take_out(self, error: BaseException | None = None) -> bool:
        """Take them out of the caches that they are in; False where somewhere else holds one.

        Args:
            error: what is on its way; its traceback may hold some.
        """
        left = self._alive()
        if not left:
            return True
        is_elsewhere = self._caches.take_out(left)
        del left
        if error is not None and not (is_elsewhere and isinstance(error, Exception)):
            return True
        # some may wait in cycles
        if self._alive():
            gc.collect()
        return not self._alive()

    def _alive(self) -> list[Tensor]:
        # torch makes small cycles around the mode for each operation
        if self._mode() is not None:
            gc.collect(1)
        mode = self._mode()
        if mode is None:
            return []
        fakes = instances(tracked_objects(), FakeTensor)
        return [each for each in fakes if mode_of(each) is mode and id(each) not in self._others]

    def error(self) -> PredictionError:
        """Return the error about those that are left, which are disposed."""
        left = self._alive()
        chains = {found[0].chain: None for found in find_holders(left, ignore=(left,)) if found}
        what = describe_tensor(left[0])
        # used by mistake, each is to say so, instead of training with it in silence
        dispose(left)
        return PredictionError(
            "The memory of this work can't be predicted: it keeps what it computes for later calls "
            f"in {listed([*chains] or ['an unknown object'], most=3)}, which now holds a tensor "
            f"without data ({what}), and what it held before is not known. Nothing else was "
            "changed. Remove the tensor there. Then run the work once with real data of the same "
            "sizes before you predict, or keep the tensor as an attribute of a module."
        )
