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
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from types import FrameType
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from tenure._callers import module_of, outside_of_mode
from tenure._heap import instances, tracked_objects
from tenure._torch.compiler import is_dynamo_compiling
from tenure._torch.patches import Patch

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
    # what a Trainer of Lightning shows in callback_metrics after a scope around fit()
    *(
        (f"{package}.trainer.connectors.logger_connector.result", "_ResultCollection._get_cache")
        for package in ("lightning.pytorch", "pytorch_lightning")
    ),
}
_COPYING = {"copy", "torch._tensor", "torch.overrides"}
"""The modules whose frames stand between ``copy.deepcopy`` of an object and that of its tensors."""
_KEEP_PLAIN_ATTRIBUTES = ("transformers.", "peft.")
# of their modules: what a dynamic RoPE has seen, the shift of positions by images; the prompts and
# indices of adapters, and the norms with which DoRA undoes a merge
_KEPT_BY_MODULES = (
    *("max_seq_len_cached", "long_inv_freq", "rope_deltas"),
    *("prompt_tokens", "indices", "shira_indices", "_caches"),
)
_STATE_CONTAINERS = frozenset({list, tuple, dict, defaultdict, OrderedDict, deque})


@functools.lru_cache(maxsize=4096)
def is_library_code(module: str, function: str) -> bool:
    """Return whether what a function makes belongs to its library, not to the block.

    Args:
        module: the name of its module.
        function: its qualified name, as in ``co_qualname``.
    """
    return module.startswith(_LIBRARY_MODULES) or (module, function) in _KEEPS_WHAT_IT_MAKES


def copies_library_object(frame: FrameType | None) -> bool:
    """Return whether the ``copy.deepcopy`` in ``frame`` is copying a module or an optimizer.

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


def install_hooks(release: Callable[[Iterable[Tensor]], object]) -> None:
    """Call ``release`` from now on with the tensors that modules and optimizers make their own.

    The state of an optimizer is walked only as ``release`` asks for its tensors: each step of a
    program would pay for that, also where no scope is open.
    """

    def on_registration(module: nn.Module, name: str, tensor: Any) -> None:
        # torch before 2.12 traces this hook where a compiled module assigns a buffer
        if isinstance(tensor, Tensor) and not is_dynamo_compiling():
            release([tensor])

    def on_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        release(_tensors_of(optimizer))

    module_hooks.register_module_buffer_registration_hook(on_registration)
    module_hooks.register_module_parameter_registration_hook(on_registration)
    register_optimizer_step_post_hook(on_step)


def _tensors_of(optimizer: Optimizer) -> Iterator[Tensor]:
    for value in _held_by(_state_of(optimizer)):
        if isinstance(value, Tensor):
            yield value


# --- what they hold, however it came there


_known: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""Modules and optimizers that are alive, by identity: a class may compute its hash."""


def held_as_state(wanted: set[int]) -> set[int]:
    """Return the identities of ``wanted`` that a module or an optimizer holds as its state."""
    if not wanted:
        return set()
    # patched first: what another thread makes meanwhile is in the heap, or noted
    if new := [cls for cls in _classes() if not _patch_of(cls).need()]:
        for owner in instances(tracked_objects(), *new):
            _known[id(owner)] = owner
    # other threads make more meanwhile: the list of references is made in one go
    alive = [owner for known in _known.valuerefs() if (owner := known()) is not None]
    states = list(chain.from_iterable(map(_state_of, alive)))
    return wanted.intersection(map(id, _held_by(states)))


def _held_by(containers: list[Any]) -> Iterator[Any]:
    """Yield all that containers of state hold, however deep; most of it is found in C."""
    # what is made on the way stays in here, so that no identity is given out twice
    seen: dict[int, Any] = {}
    while containers:
        held = gc.get_referents(*containers)
        yield from held
        inner = {id(value): value for value in held if type(value) in _STATE_CONTAINERS}
        containers = [inner[key] for key in inner.keys() - seen.keys()]
        seen |= inner


def _classes() -> list[type]:
    # torchmetrics may be imported at any time; a metric is a module that is copied in its own way
    metrics = sys.modules.get("torchmetrics.metric")
    return [nn.Module, Optimizer, *([] if metrics is None else [metrics.Metric])]


@functools.cache
def _patch_of(cls: type) -> Patch:
    """Return the patch of a class that notes its instances; copies and unpickled ones as well.

    torch has no hook for a module or an optimizer that is made.

    Source: ``torch._dynamo.mutation_guard.install_generation_tagging_init``.
    """
    noting = functools.partial(_noting, cls)
    return Patch(cls, {"__init__": noting, "__setstate__": noting}, lingers=True)


def _noting(cls: type, method: Any) -> Any:
    # dynamo may trace it, and so finds neither an object nor a method of ours in it
    @functools.wraps(method)
    def run(self: object, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        if not is_dynamo_compiling():
            _known[id(self)] = self
            _patch_of(cls).was_called()
        return result

    return run


def _state_of(owner: Any) -> list[Any]:
    """Return the containers of the state of a module, a metric or an optimizer."""
    # past a __getattribute__ of the user's
    attributes: dict[str, Any] = object.__getattribute__(owner, "__dict__")
    if not issubclass(type(owner), Optimizer):
        # a metric, all of which is state
        if isinstance(attributes.get("_defaults"), dict):
            return [attributes]
        kept = [attributes.get("_buffers")]
        if type(owner).__module__.startswith(_KEEP_PLAIN_ATTRIBUTES):
            kept.append([attributes[name] for name in _KEPT_BY_MODULES if name in attributes])
        return kept
    # all but the parameters, which are what it was given
    own = [value for name, value in attributes.items() if name not in {"state", "param_groups"}]
    groups = [
        [value for name, value in group.items() if name != "params"]
        for group in attributes.get("param_groups", ())
    ]
    return [*attributes.get("state", {}).values(), own, groups]
