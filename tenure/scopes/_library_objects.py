"""Tensors that belong to a library object and not to the block that happened to make them.

Optimizer state, buffers, a GradScaler's scale and the flat tensors of a distributed wrapper live as
long as their object. They are recognised by who makes them and by torch's own public hooks; and,
however they came there, by who holds them when a scope has survivors. The first time the heap is
searched for modules and optimizers; from then on they are known from when they are made, because a
search would cost more than the block did.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from types import FrameType
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from tenure._callers import module_of, outside_of_mode
from tenure._errors import ScopeUsageError
from tenure._heap import instances, is_kind, tracked_objects
from tenure._torch.compiler import is_dynamo_compiling
from tenure._torch.patches import Patch

from ._trees import tensors_in

_LIBRARY_MODULES = (
    "torch.optim",
    "torch.amp",
    "torch.cuda.amp",
    "torch.nn.modules.module",
    "torch.nn.utils.parametriz",
    "torch.nn.utils.prune",
    "torch.nn.utils.spectral_norm",
    "torch.nn.utils.weight_norm",
    "torch.nn.parallel",
    "torch.distributed",
)
_KEEPS_WHAT_IT_MAKES = {
    # A jagged tensor is made with the help of one that torch makes once and keeps in a global:
    # https://github.com/pytorch/pytorch/blob/main/torch/nested/_internal/nested_tensor.py
    ("torch.nested._internal.nested_tensor", "_nt_view_dummy"),
    # Up to torch 2.11 a checkpoint finds its inputs by the node of a tensor without elements:
    # https://github.com/pytorch/pytorch/blob/v2.11.0/torch/utils/checkpoint.py
    ("torch.utils.checkpoint", "_NoopSaveInputs.forward"),
}
_COPYING = {"copy", "torch._tensor", "torch.overrides"}
"""The modules whose frames stand between ``copy.deepcopy`` of an object and that of its tensors."""
_CONTAINERS = (list, tuple, dict, deque)

_Attributes = dict[str, Any]

_METRICS = "torchmetrics.metric"
# what a metric computed last, what it puts aside in forward, and what it starts again from
_KEPT_BY_METRICS = ("_computed", "_forward_cache", "_cache", "_defaults")
_STATE_CONTAINERS = frozenset({list, tuple, dict, defaultdict, OrderedDict, deque})
_NOTHING: _Attributes = {}


@functools.lru_cache(maxsize=4096)
def is_library_code(module: str, function: str) -> bool:
    """Whether what a function makes belongs to its library, not to the block.

    Args:
        module: the name of its module.
        function: its qualified name, as in ``co_qualname``.
    """
    return module.startswith(_LIBRARY_MODULES) or (module, function) in _KEEPS_WHAT_IT_MAKES


def copies_library_object(frame: FrameType | None) -> bool:
    """Whether the ``copy.deepcopy`` that runs in ``frame`` is copying a module or an optimizer.

    Its buffers are copied past every hook of torch; the object being copied tells whose they are.
    """
    while frame is not None:
        if module_of(frame) not in _COPYING:
            frame = outside_of_mode(frame)
        elif isinstance(frame.f_locals.get("x"), nn.Module | Optimizer):
            return True
        else:
            frame = frame.f_back
    return False


def install_hooks(release: Callable[[list[Tensor]], object]) -> None:
    """From now on call ``release`` with the tensors that a module or an optimizer makes its own."""

    def on_registration(module: nn.Module, name: str, tensor: Any) -> None:
        # torch before 2.12 traces this hook where a compiled module assigns a buffer
        if isinstance(tensor, Tensor) and not is_dynamo_compiling():
            release([tensor])

    def on_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        release(_tensors_of(optimizer))

    module_hooks.register_module_buffer_registration_hook(on_registration)
    module_hooks.register_module_parameter_registration_hook(on_registration)
    register_optimizer_step_post_hook(on_step)


def _tensors_of(optimizer: Optimizer) -> list[Tensor]:
    """The tensors of its state, of its groups (without the parameters) and of its attributes."""
    *states, own, groups = _state_of_optimizer(vars(optimizer))
    states = [state.values() for state in states if isinstance(state, dict)]
    values = list(chain(*states, own, *groups))
    found = [value for value in values if isinstance(value, Tensor)]
    for value in values:
        if isinstance(value, _CONTAINERS) and value:
            # a step must not fail for an attribute that can't be read
            with suppress(ScopeUsageError):
                found += tensors_in((value,))
    return found


# --- what they hold, however it came there


class _Kind:
    """A class whose instances hold state, and those that are alive, weakly.

    torch has no hook for a module or an optimizer that is made, so while it is known who is there,
    two methods of the class are patched; copies and unpickled instances pass ``__setstate__``.
    Dynamo may trace what stands there, and so wants to find no more than functions.

    Args:
        cls: the class.
        state_of: the containers of state, from the attributes of one instance.

    Source: ``torch._dynamo.mutation_guard.install_generation_tagging_init``.
    """

    def __init__(self, cls: type, state_of: Callable[[_Attributes], Any]) -> None:
        self.cls = cls
        self.state_of = state_of
        # by identity: a class may compute its hash
        self.known: WeakValueDictionary[int, Any] = WeakValueDictionary()
        patched = {"__init__": _remembering, "__setstate__": _remembering}
        self.making = Patch(cls, patched, lingers=True)

    def learn(self, heap: list[Any]) -> None:
        """Remember those that are there."""
        for owner in instances(heap, lambda cls: is_kind(cls, self.cls)):
            self.known[id(owner)] = owner

    def states(self) -> list[Any]:
        """The containers of state of all of them."""
        # other threads make more meanwhile: the list of references is made in one go
        alive = [owner for known in self.known.valuerefs() if (owner := known()) is not None]
        # past a __getattribute__ of the user's
        return [self.state_of(object.__getattribute__(owner, "__dict__")) for owner in alive]


def held_as_state(wanted: set[int]) -> set[int]:
    """Those of the identities ``wanted`` that a module or an optimizer holds as its state."""
    found = set[int]()
    if not wanted:
        return found
    kinds = _kinds()
    # patched first: what another thread makes meanwhile is in the heap, or tells
    if new := [kind for kind in kinds if not kind.making.need()]:
        heap = tracked_objects()
        for kind in new:
            kind.learn(heap)
        del heap
    containers = [state for kind in kinds for state in kind.states()]
    # what is made on the way stays in here, so that no identity is given out twice
    seen: dict[int, Any] = {}
    while containers:
        held = gc.get_referents(*containers)
        found |= wanted.intersection(map(id, held))
        inner = {id(value): value for value in held if type(value) in _STATE_CONTAINERS}
        containers = [inner[key] for key in inner.keys() - seen.keys()]
        seen |= inner
    return found


def _remembering(method: Any) -> Any:
    # dynamo may trace it, and so finds neither an object nor a method of ours in it
    @functools.wraps(method)
    def run(self: object, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        if not is_dynamo_compiling():
            # the method of one class may be called past that of another, as a metric's is
            for kind in _kinds():
                if is_kind(type(self), kind.cls):
                    kind.known[id(self)] = self
        return result

    return run


def _kinds() -> list[_Kind]:
    # torchmetrics may be imported at any time
    return [*_of_torch(), *(_of_torchmetrics() if _METRICS in sys.modules else ())]


@functools.cache
def _of_torch() -> list[_Kind]:
    return [_Kind(nn.Module, _state_of_module), _Kind(Optimizer, _state_of_optimizer)]


@functools.cache
def _of_torchmetrics() -> list[_Kind]:
    """A metric is a module that has a state of another kind, and is copied in a way of its own."""
    return [_Kind(sys.modules[_METRICS].Metric, _state_of_metric)]


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
