"""What modules and optimizers hold is theirs, however it came there, also past every hook of torch.

They are known from when they are made: only their own state is compared with what survived a scope,
because a search of the heap would cost more than the block did.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.optim import Optimizer

from tenure._heap import instances, is_kind, tracked_objects
from tenure._torch.compiler import is_dynamo_compiling

_Attributes = dict[str, Any]

_METRICS = "torchmetrics.metric"
# what a metric computed last, what it puts aside in forward, and what it starts again from
_KEPT_BY_METRICS = ("_computed", "_forward_cache", "_cache", "_defaults")
_CONTAINERS = frozenset({list, tuple, dict, defaultdict, OrderedDict, deque})
_SMALL = 256  # references that are not worth pruning
_NOTHING: _Attributes = {}


class _Owners:
    """The instances of one class that are alive, held weakly.

    Args:
        cls: the class; copies and unpickled instances pass its own ``__setstate__``.
        state_of: the containers of state, from the attributes of one instance.
    """

    def __init__(self, cls: type, state_of: Callable[[_Attributes], Any]) -> None:
        self._cls = cls
        self._state_of = state_of
        first = next(base for base in reversed(cls.__mro__) if "__dict__" in vars(base))
        self._attributes = vars(first)["__dict__"].__get__
        self._references: dict[int, ref[Any]] = {}
        self._next_prune = _SMALL
        self._knows_the_old = False
        _tell_after(cls, "__init__")
        _tell_after(cls, "__setstate__")

    def states(self) -> list[Any]:
        """The containers of state of all of them."""
        if not self._knows_the_old:  # one look at the heap, and only where something survived
            self._knows_the_old = True
            for owner in instances(tracked_objects(), lambda kind: is_kind(kind, self._cls)):
                self.add(owner)
        # past a __getattribute__ of the user's
        return list(map(self._state_of, map(self._attributes, self._alive())))

    def _alive(self) -> list[Any]:
        references = self._references.copy().values()
        return [owner for reference in references if (owner := reference()) is not None]

    def add(self, owner: object) -> None:
        """Remember ``owner``, if it is one of the class."""
        if not is_kind(type(owner), self._cls):  # isinstance would run a __getattribute__
            return
        self._references[id(owner)] = ref(owner)
        if len(self._references) >= self._next_prune:
            self._references = {id(owner): ref(owner) for owner in self._alive()}
            self._next_prune = max(_SMALL, 2 * len(self._references))


def watch_owners() -> None:
    """From now on know each module and each optimizer that is made."""
    _kinds()


def held_by_owners(tensors: Iterable[Tensor]) -> set[int]:
    """The identities of those ``tensors`` that a module or an optimizer holds as its state."""
    wanted, found = set(map(id, tensors)), set[int]()
    containers = [state for kind in _kinds() for state in kind.states()]
    # what is made on the way stays in here, so that no identity is given out twice
    seen: dict[int, Any] = {}
    while containers:
        held = gc.get_referents(*containers)
        found |= wanted.intersection(map(id, held))
        inner = {id(value): value for value in held if type(value) in _CONTAINERS}
        containers = [inner[key] for key in inner.keys() - seen.keys()]
        seen |= inner
    return found


def _kinds() -> list[_Owners]:
    # torchmetrics may be imported at any time
    return [*_of_torch(), _of_torchmetrics()] if _METRICS in sys.modules else _of_torch()


@functools.cache
def _of_torch() -> list[_Owners]:
    return [_Owners(nn.Module, _state_of_module), _Owners(Optimizer, _state_of_optimizer)]


@functools.cache
def _of_torchmetrics() -> _Owners:
    """A metric is a module that has a state of another kind, and is copied in a way of its own."""
    return _Owners(sys.modules[_METRICS].Metric, _state_of_metric)


def _state_of_module(attributes: _Attributes) -> Any:
    return attributes.get("_buffers", _NOTHING)


def _state_of_optimizer(attributes: _Attributes) -> Any:
    """All but the parameters, which are what it was given."""
    state = attributes.get("state", _NOTHING)
    own = [value for name, value in attributes.items() if name not in {"state", "param_groups"}]
    groups = [
        [value for name, value in group.items() if name != "params"]
        for group in attributes.get("param_groups", ())
    ]
    return [*state.values(), own, groups]


def _state_of_metric(attributes: _Attributes) -> Any:
    declared = attributes.get("_defaults", _NOTHING)
    return [attributes.get(name) for name in (*declared, *_KEPT_BY_METRICS)]


def _remember(owner: object) -> None:
    for kind in _kinds():
        kind.add(owner)


def _tell_after(cls: type, name: str) -> None:
    """Remember each instance on which the method ``name`` of ``cls`` has run.

    torch has no hook for a module or an optimizer that is made. Dynamo, which wants to know of new
    modules too, wraps the same two methods. It may trace what stands here, and so wants to find no
    more than functions.

    Source: ``torch._dynamo.mutation_guard.install_generation_tagging_init``.
    """
    method: Any = getattr(cls, name)

    @functools.wraps(method)
    def run(self: object, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        if not is_dynamo_compiling():
            _remember(self)
        return result

    setattr(cls, name, run)
