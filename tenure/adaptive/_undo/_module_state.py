"""All that a failed attempt changes in modules, noted and brought back together.

That is how they are set; their buffers, such as running statistics; and their plain attributes,
such as caches and counters.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

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
    has_values,
    noted,
    noted_container,
    remember_written,
)

_LAYERS = ("torch.nn.modules.", "torch.nn.utils.")
_OWN_KINDS = (dict, OrderedDict, set)
_OWN = tuple([name for name, each in vars(nn.Module()).items() if type(each) in _OWN_KINDS])
"""Hooks, and the names and objects of parameters, buffers and modules."""
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_PLAIN = frozenset((int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device))


class ModuleState:
    """Attributes and buffers of some modules, and how they are set.

    How they are set is training or evaluation, the hooks, and which parameters get gradients: a
    function that sets one and puts it back at its end doesn't, if it runs out of memory between.

    A tensor that a failed attempt keeps on a module, as a cache for calls to come, is let go with
    the attempt: the attribute gets back what it held, and so do the numbers beside it. Dicts,
    lists, sets and deques get their items back, also inside each other, and tensors that were
    written in place their values. So do layers of torch, on which hooks keep such things; torch's
    wrappers set their own. Buffers, parameters and modules that were not there are taken away, and
    what a parametrization, a lazy layer or an assignment has replaced is there again.

    Args:
        modules: all modules that the work runs, those below others too; what is added to them
            later counts from the next ``begin`` on, and `add` notes it at once.
        with_modes: whether how they are set, and which parameters and modules they have, is noted
            as well.
    """

    __slots__ = (
        "_buffers", "_contents", "_frozen", "_lazy", "_modules", "_noted", "_own_names", "_seen",
        "_tensors", "_with_modes",
    )  # fmt: skip

    def __init__(self, modules: Iterable[nn.Module], *, with_modes: bool = True) -> None:
        self._modules, self._with_modes = modules, with_modes
        # what the first of two passes has made is for the second one, too
        self._own_names = _OWN if with_modes else ("_buffers",)
        self._forget()

    def begin(self) -> None:
        """Note them."""
        # the copies of the attempt before go first
        if self._noted:
            self.finish()
        self.add(self._modules)

    def add(self, modules: Iterable[nn.Module]) -> None:
        """Note more modules, while an attempt is on its way and before they run in it."""
        held: list[tuple[nn.Module, str, Any]] = []
        n_buffers = len(self._buffers)
        # a mode would see each attribute of a tensor that is read
        with without_functions():
            for module in modules:
                kind, space, attributes = type(module), vars(module), None
                # most are empty; those of a scripted module are of other kinds
                own = {
                    name: each.copy()
                    for name in self._own_names
                    if (each := space.get(name)) and type(each) in _OWN_KINDS
                }
                if self._with_modes:
                    for parameter in module._parameters.values():
                        if parameter is not None:
                            self._frozen.append((parameter, parameter.requires_grad))
                            if is_lazy(parameter):
                                self._lazy.append((parameter, type(parameter)))
                home = kind.__module__
                is_made = not self._with_modes and issubclass(kind, LazyModuleMixin)
                # those are torch's wrappers, such as of ranks or compiled code
                is_set_by_torch = f"{home}.".startswith("torch.") and not home.startswith(_LAYERS)
                if not (is_made or is_set_by_torch):
                    attributes = {}
                    for name in space.keys() - OF_EVERY_MODULE:
                        attributes[name] = value = space[name]
                        if type(value) not in _PLAIN:
                            held.append((module, name, value))
                self._noted.append((module, kind, module.training, own, attributes))
                for name, tensor in module._buffers.items():
                    if tensor is None or not is_lazy(tensor):
                        self._buffers.append((module, name, tensor, None))
                    elif self._with_modes:
                        self._lazy.append((tensor, type(tensor)))
            if held or len(self._buffers) > n_buffers:
                with persist(), torch.no_grad():
                    self._note_held(held)
                    for i, (module, name, tensor, _) in enumerate(self._buffers[n_buffers:]):
                        if tensor is not None and has_values(tensor):
                            note = noted(module, name, tensor)
                            self._buffers[n_buffers + i] = module, name, tensor, note

    def finish(self) -> None:
        """Keep what the attempt set and wrote, and drop the copies."""
        for _, _, _, note in self._buffers:
            if note is not None:
                self._tensors.append(note)
        if self._tensors:
            remember_written(self._tensors)
        self._forget()

    def undo(self) -> None:
        """Set them as they were, and put back values, and what is no longer there."""
        for module, name, tensor, note in self._buffers:
            module._buffers[name] = tensor
            if note is not None:
                note.undo()
        for module, kind, training, own, attributes in self._noted:
            space = vars(module)
            for name in self._own_names:
                now: Any = space.get(name)
                before = own.get(name, ())
                # the object itself stays: handles of hooks refer to it
                is_own = type(now) in _OWN_KINDS and (now or before)
                if is_own and _objects_in(now) != _objects_in(before):
                    now.clear()
                    now.update(before)
            if self._with_modes:
                if module.training != training:
                    module.training = training
                # a parametrization, or the first call of a lazy layer, sets another one
                if type(module) is not kind:
                    module.__class__ = kind
            if attributes is None:
                continue
            # what every module has, its dicts of parameters and hooks among it, is others' to undo
            for name in space.keys() - attributes.keys() - OF_EVERY_MODULE:
                del space[name]
            space.update(attributes)
        for contents in self._contents:
            contents.undo()
        for each in self._tensors:
            each.undo()
        with without_functions():
            for tensor, lazy_kind in self._lazy:
                if not is_lazy(tensor):
                    tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                    tensor.__class__ = lazy_kind
            for parameter, requires_grad in self._frozen:
                if parameter.requires_grad != requires_grad:
                    parameter.requires_grad_(requires_grad)

    def written(self) -> list[tuple[nn.Module, str]]:
        """Return the buffers, by module and name, that have other values than when they were noted.

        One that has another shape is a cache that grew, and does not count.
        """
        written: list[tuple[nn.Module, str]] = []
        unsure: list[tuple[nn.Module, str]] = []
        pairs: list[tuple[Tensor, Tensor]] = []
        # a lazy layer sets its own in its first call
        first = {module for module, kind, *_ in self._noted if type(module) is not kind}
        for module, name, tensor, note in self._buffers:
            buffers = module._buffers
            # of a scripted module, a mapping without get()
            now = buffers[name] if name in buffers else None  # noqa: SIM401
            if note is None or now is None or module in first:
                continue
            # three answers that cost nothing, then the comparison of values for what is left
            if now is tensor and note.has_other_version():
                written.append((module, name))
            elif (
                not note.was_left_alone() and _may_be_statistic(now)
                if now is tensor
                else now.shape == note.copy.shape
            ):
                unsure.append((module, name))
                pairs.append((now, note.copy))
        with without_functions(), torch.no_grad():
            answers = differing(pairs)
        return written + [each for each, differs in zip(unsure, answers, strict=True) if differs]

    def kept(self) -> list[tuple[nn.Module, str, Any]]:
        """Return the values that attributes got, and the tensors that were written, since then."""
        found: list[tuple[nn.Module, str, Any]] = [
            (note.owner, note.name, note.tensor)
            for note in self._tensors
            if note.has_other_version()
        ]
        for module, *_, attributes in self._noted:
            before = vars(module) if attributes is None else attributes
            for name, value in vars(module).items():
                if name not in OF_EVERY_MODULE and value is not before.get(name):
                    found.append((module, name, value))
        return found

    def _forget(self) -> None:
        # each module, its class, its mode, the containers of `_OWN` that are not empty, and its
        # attributes unless torch sets them
        self._noted: list[tuple[nn.Module, type, bool, dict[str, Any], dict[str, Any] | None]] = []
        self._buffers: list[tuple[nn.Module, str, Tensor | None, TensorNote | None]] = []
        self._lazy: list[tuple[Tensor, type]] = []
        self._frozen: list[tuple[Tensor, bool]] = []
        self._contents: list[ContainerNote] = []
        self._tensors: list[TensorNote] = []
        # what is noted is kept, so an id stands for one object
        self._seen: set[int] = set()

    def _note_held(self, waiting: list[tuple[nn.Module, str, Any]]) -> None:
        """Note what attributes of modules hold, and what stands in containers there."""
        while waiting:
            module, name, value = waiting.pop()
            if id(value) in self._seen:
                continue
            items: Iterable[Any] = ()
            if issubclass(type(value), Tensor):
                if has_values(value) and not value.requires_grad:
                    self._tensors.append(noted(module, name, value))
            elif issubclass(type(value), tuple):
                items = tuple.__iter__(value)
            elif (contents := noted_container(value)) is not None:
                self._contents.append(contents)
                items = contents.items
            else:
                continue
            self._seen.add(id(value))
            # by number: the text of a key may be that of a whole model, and others each time
            for i, (_, each) in enumerate(entries(items)):
                if type(each) not in _PLAIN:
                    waiting.append((module, f"{name}[{i}]", each))


def _objects_in(own: Any) -> list[Any]:
    # a first call may replace what stands under a name, such as a placeholder; and fully_shard
    # itself replaces parameters by whole ones, and puts them back
    others = own.values() if isinstance(own, dict) else ()
    return [*own, *[id(each) for each in others if not issubclass(type(each), Tensor)]]


def modules_below(models: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the models and all modules below them, each once, the upper ones first."""
    found: dict[int, nn.Module] = {}
    waiting: list[nn.Module | None] = list(models)[::-1]  # type: ignore[assignment]
    while waiting:
        module = waiting.pop()
        if module is not None and id(module) not in found:
            found[id(module)] = module
            if below := module._modules:
                waiting += [*below.values()][::-1]
    return list(found.values())


def named_modules(roots: Mapping[str, nn.Module]) -> list[tuple[str, nn.Module]]:
    """Return every module at or below the roots, each once, with its name; the upper ones first."""
    found: dict[int, tuple[str, nn.Module]] = {}
    waiting = [*roots.items()][::-1]
    while waiting:
        name, module = waiting.pop()
        if id(module) not in found:
            found[id(module)] = name, module
            for key, each in [*module._modules.items()][::-1]:
                if each is not None:
                    waiting.append((f"{name}.{key}", each))
    return list(found.values())


def _may_be_statistic(tensor: Tensor) -> bool:
    """Return whether batch norm may have written it without counting a version."""
    is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
    return is_plain and tensor.is_floating_point() and not tensor.is_meta
