"""All that a failed attempt changes in modules, noted and brought back together.

That is how they are set; their buffers, such as running statistics; and their plain attributes,
such as caches and counters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from tenure._torch.quiet import without_functions
from tenure.scopes import persist

from ._notes import (
    ContainerNote,
    TensorNote,
    differing,
    entries,
    is_gone,
    noted,
    noted_container,
    remember_written,
)

_LAYERS = ("torch.nn.modules.", "torch.nn.utils.")
_Hooks = dict[int, Any]
_NO_HOOKS: _Hooks = {}
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_PLAIN = frozenset((int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device))


class _NotedBuffer(NamedTuple):
    module: nn.Module
    name: str
    tensor: Tensor | None
    note: TensorNote | None


class ModuleState:
    """Attributes and buffers of some modules, and how they are set.

    How they are set is training or evaluation, the hooks of forward passes, and which parameters
    get gradients: a function that sets one and puts it back at its end doesn't, if it runs out of
    memory between.

    A tensor that a failed attempt keeps on a module, as a cache for calls to come, is let go with
    the attempt: the attribute gets back what it held, and so do the numbers beside it. Dicts,
    lists, sets and deques get their items back, also inside each other, and tensors that were
    written in place their values. So do layers of torch, on which hooks keep such things; torch's
    wrappers and lazy layers set their own. Buffers that were not there are taken away.

    Args:
        modules: all modules that the work runs, those below others too; what is added to them
            later counts from the next ``begin`` on, and `add` notes it at once.
        with_modes: whether how they are set is noted as well.
    """

    __slots__ = (
        "_buffers", "_contents", "_frozen", "_hooks", "_modules", "_noted", "_seen", "_tensors",
        "_training", "_with_modes",
    )  # fmt: skip

    def __init__(self, modules: Iterable[nn.Module], *, with_modes: bool = True) -> None:
        self._modules, self._with_modes = modules, with_modes
        self._forget()

    def begin(self) -> None:
        """Note them."""
        # the copies of the attempt before go first
        self.finish()
        self.add(self._modules)

    def add(self, modules: Iterable[nn.Module]) -> None:
        """Note more modules, while an attempt is on its way and before they run in it."""
        # a mode would see each attribute of a tensor that is read
        with without_functions(), persist(), torch.no_grad():
            for module in modules:
                self._note(module)

    def finish(self) -> None:
        """Keep what the attempt set and wrote, and drop the copies."""
        notes = (buffer.note for buffer in self._buffers if buffer.note is not None)
        remember_written((*self._tensors, *notes))
        self._forget()

    def undo(self) -> None:
        """Set them as they were, and put back values, and what is no longer there."""
        for module, _, names in self._noted:
            for name in set(module._buffers.keys()) - names:
                delattr(module, name)
        for module, name, tensor, note in self._buffers:
            module._buffers[name] = tensor
            if note is not None:
                note.undo()
        for module, attributes, _ in self._noted:
            if attributes is None:
                continue
            space = vars(module)
            # what every module has, its dicts of parameters and hooks among it, is others' to undo
            for name in space.keys() - attributes.keys() - OF_EVERY_MODULE:
                del space[name]
            space.update(attributes)
        for contents in self._contents:
            contents.undo()
        for each in self._tensors:
            each.undo()
        for module, training in self._training:
            if module.training != training:
                module.training = training
        for hooks, before in self._hooks:
            # the dict itself stays: handles of hooks refer to it
            if hooks.keys() != before.keys():
                hooks.clear()
                hooks.update(before)
        for parameter, requires_grad in self._frozen:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)

    def written(self) -> list[tuple[nn.Module, str]]:
        """Return the buffers, by module and name, that have other values than when they were noted.

        One that has another shape is a cache that grew, and does not count.
        """
        written: list[_NotedBuffer] = []
        unsure: list[tuple[_NotedBuffer, tuple[Tensor, Tensor]]] = []
        for buffer in self._buffers:
            note, now = buffer.note, _buffer(buffer.module, buffer.name)
            if note is None or now is None:
                continue
            # three answers that cost nothing, then the comparison of values for what is left
            if now is buffer.tensor and note.has_other_version():
                written.append(buffer)
            elif now is buffer.tensor:
                if not note.was_left_alone() and _may_be_statistic(now):
                    unsure.append((buffer, (now, note.copy)))
            elif now.shape == note.copy.shape:
                unsure.append((buffer, (now, note.copy)))
        with without_functions(), torch.no_grad():
            answers = differing([pair for _, pair in unsure])
        written += [buffer for (buffer, _), differs in zip(unsure, answers, strict=True) if differs]
        return [(buffer.module, buffer.name) for buffer in written]

    def _forget(self) -> None:
        self._training: list[tuple[nn.Module, bool]] = []
        self._hooks: list[tuple[_Hooks, _Hooks]] = []
        self._frozen: list[tuple[Tensor, bool]] = []
        # with the attributes of each, unless torch sets them, and the names of its buffers
        self._noted: list[tuple[nn.Module, dict[str, Any] | None, set[str]]] = []
        self._contents: list[ContainerNote] = []
        self._tensors: list[TensorNote] = []
        # what is noted is kept, so an id stands for one object
        self._seen: set[int] = set()
        self._buffers: list[_NotedBuffer] = []

    def _note(self, module: nn.Module) -> None:
        buffers = module._buffers
        if self._with_modes:
            self._training.append((module, module.training))
            # a lazy layer removes its own in its first call, with its class
            if not issubclass(type(module), LazyModuleMixin):
                for hooks in (module._forward_pre_hooks, module._forward_hooks):
                    self._hooks.append((hooks, hooks.copy() if hooks else _NO_HOOKS))
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._frozen.append((parameter, parameter.requires_grad))
        attributes: dict[str, Any] | None = None
        if not _is_set_by_torch(type(module)):
            space = vars(module)
            attributes, waiting = {}, []
            for name in space.keys() - OF_EVERY_MODULE:
                attributes[name] = value = space[name]
                if type(value) not in _PLAIN:
                    waiting.append((name, value))
            if waiting:
                self._note_below(module, waiting)
        self._noted.append((module, attributes, set(buffers.keys())))
        for name, tensor in buffers.items():
            # a first call that fails may leave a lazy buffer with a shape
            if tensor is None or not is_lazy(tensor):
                note = None
                if tensor is not None and not is_gone(tensor):
                    note = noted(module, name, tensor)
                self._buffers.append(_NotedBuffer(module, name, tensor, note))

    def _note_below(self, module: nn.Module, waiting: list[tuple[str, Any]]) -> None:
        while waiting:
            name, value = waiting.pop()
            if id(value) in self._seen:
                continue
            if issubclass(type(value), Tensor):
                self._seen.add(id(value))
                if not (is_gone(value) or value.requires_grad):
                    self._tensors.append(noted(module, name, value))
            elif issubclass(type(value), tuple):
                self._seen.add(id(value))
                waiting += _changeable(name, tuple.__iter__(value))
            elif (contents := noted_container(value)) is not None:
                self._seen.add(id(value))
                self._contents.append(contents)
                waiting += _changeable(name, contents.items)


def modules_below(models: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the models and all modules below them, each once, the upper ones first."""
    return [module for _, module in named_modules({str(i): m for i, m in enumerate(models)})]


def named_modules(roots: Mapping[str, nn.Module]) -> list[tuple[str, nn.Module]]:
    """Return every module at or below the roots, each once, with its name; the upper ones first."""
    found: dict[int, tuple[str, nn.Module]] = {}
    waiting = [*roots.items()][::-1]
    while waiting:
        name, module = waiting.pop()
        if id(module) not in found:
            found[id(module)] = name, module
            if below := module._modules:
                named = [(f"{name}.{key}", each) for key, each in below.items() if each is not None]
                waiting += named[::-1]
    return list(found.values())


def _changeable(name: str, items: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a container that may change, with a name each."""
    # by number: the text of a key may be that of a whole model, and keys may be others each time
    numbered = enumerate(each for _, each in entries(items))
    return ((f"{name}[{i}]", each) for i, each in numbered if type(each) not in _PLAIN)


def _is_set_by_torch(kind: type[nn.Module]) -> bool:
    """Return whether it is a wrapper, such as of ranks or compiled code, or a lazy layer."""
    name = kind.__module__
    if not name.startswith(_LAYERS):
        return name.startswith("torch.") or name == "torch"
    return issubclass(kind, LazyModuleMixin)


def _buffer(module: nn.Module, name: str) -> Tensor | None:
    # of a scripted module, a mapping without get()
    buffers = module._buffers
    return buffers[name] if name in buffers else None  # noqa: SIM401


def _may_be_statistic(tensor: Tensor) -> bool:
    """Return whether batch norm may have written it without counting a version."""
    is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
    return is_plain and tensor.is_floating_point() and not tensor.is_meta
