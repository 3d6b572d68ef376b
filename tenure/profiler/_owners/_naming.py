"""Names of the tensors of modules and optimizers, read without running any code of theirs.

Every name is given by identity, so it says nothing once the tensor is gone: make them anew for each
report.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from tenure._heap import instance_attributes, is_kind, type_name
from tenure._registries import NamedTensor

_T = TypeVar("_T")

PARAMETERS = "parameters"
BUFFERS = "buffers"
OPTIMIZER_STATE = "optimizer state"

_REGISTRIES = (("_parameters", PARAMETERS), ("_buffers", BUFFERS))
_SEQUENCES = (list, tuple, deque)
# State nests little, and a cycle in it must end somewhere.
_MAX_DEPTH = 4


class TensorName(NamedTuple):
    """The name of a tensor.

    Attributes:
        name: the name.
        category: as what it counts, if a module or an optimizer has it.
        order: its place among the tensors of these.
        kind: the kind of another holder.
    """

    name: str
    category: str = ""
    order: int = sys.maxsize
    kind: str = ""


def names_of(
    models: Sequence[nn.Module],
    found: Sequence[nn.Module],
    optimizers: Iterable[Optimizer],
    kept: Iterable[tuple[nn.Module | None, NamedTensor]],
) -> dict[int, TensorName]:
    """Name the tensors of modules and optimizers, by identity; several names are joined by ``+``.

    Args:
        models: modules whose tensors are called by their dotted names alone.
        found: all modules; the names of others begin with the name of their class.
        optimizers: all optimizers.
        kept: tensors that stand in no module, each with the model that it is kept for, after which
            it is called; None for one that is gone.
    """
    names: dict[int, TensorName] = {}
    # Parts of a given model have names already, and would only get longer ones here.
    known = {id(module) for model in models for _, module in _modules(model)}
    others = [module for module in outermost(found) if id(module) not in known]
    roots = [(model, "") for model in models]
    roots += _labelled(m for m in others if any(True for _ in named_tensors_of(m)))
    for module, label in roots:
        # A weight that a model has already gets no second name from one that was not given.
        taken = frozenset(names if label else ())
        for name, category, t in named_tensors_of(module):
            if id(t) not in taken:
                _add(names, t, _dotted(label, name), category)
    for served, named in kept:
        label = "" if served is None else _label_of(served, roots)
        _add(names, named.tensor, _dotted(label, named.name), named.category)
    for optimizer, label in _labelled(optimizers):
        for name, t in _state_of(optimizer, label, names):
            if id(t) not in names:
                _add(names, t, name, OPTIMIZER_STATE)
    return names


def _add(names: dict[int, TensorName], t: Tensor, name: str, category: str) -> None:
    held = names.setdefault(id(t), TensorName(name, category, len(names)))
    if name not in held.name.split("+"):
        names[id(t)] = held._replace(name=f"{held.name}+{name}")


def _state_of(
    optimizer: Optimizer, label: str, names: dict[int, TensorName]
) -> Iterator[tuple[str, Tensor]]:
    attributes = instance_attributes(optimizer)
    # by identity: subclasses of tensors may define __eq__
    states = {id(key): state for key, state in _pairs(attributes.get("state"))}
    # Groups, and not only states: an optimizer that has not stepped yet has no state.
    for index, parameter in enumerate(_parameters_of(attributes.get("param_groups"))):
        named = names.get(id(parameter))
        owner = named.name if named else f"param{index}"
        yield from _tensors_in(states.get(id(parameter)), f"{label}.{owner}")
    # Such as the history of LBFGS, or a master copy that a wrapper keeps.
    rest = {k: v for k, v in attributes.items() if k not in {"state", "param_groups"}}
    yield from _tensors_in(rest, label)


def tensors_of(
    owner: Any, label: str, names: dict[int, TensorName]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a module, or of the state of an optimizer, with names after a label."""
    if is_kind(type(owner), nn.Module):
        yield from ((_dotted(label, name), t) for name, _, t in named_tensors_of(owner))
    else:
        yield from _state_of(owner, label, names)


def _labelled(objects: Iterable[_T]) -> Iterator[tuple[_T, str]]:
    """Yield each object with the name of its class, the second instance as ``Linear#2``."""
    counts: Counter[str] = Counter()
    for each in objects:
        name = type_name(type(each))
        counts[name] += 1
        yield each, name if counts[name] == 1 else f"{name}#{counts[name]}"


def _label_of(model: nn.Module, roots: Sequence[tuple[nn.Module, str]]) -> str:
    """Return the label of a model, which may be part of another model."""
    for root, label in roots:
        for name, inner in _modules(root):
            if inner is model:
                return _dotted(label, name)
    return type_name(type(model))


def _dotted(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def named_tensors_of(module: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Yield every name in a module with its category and tensor; a tied weight has several."""
    for prefix, inner in _modules(module):
        attributes = instance_attributes(inner)
        for registry, category in _REGISTRIES:
            for name, t in _items(attributes.get(registry)):
                if is_kind(type(t), Tensor):
                    yield _dotted(prefix, name), category, t


def _modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module and all below it, each by its first name."""
    waiting: deque[tuple[str, nn.Module]] = deque([("", module)])
    seen: set[int] = set()
    while waiting:
        name, inner = waiting.popleft()
        if id(inner) not in seen:
            seen.add(id(inner))
            yield name, inner
            waiting.extend((_dotted(name, key), child) for key, child in _children(inner))


def _children(module: nn.Module) -> list[tuple[str, Any]]:
    found = _items(instance_attributes(module).get("_modules"))
    return [(key, child) for key, child in found if is_kind(type(child), nn.Module)]


def outermost(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules that no other has; of a ring of modules, one."""
    below = {id(child) for module in modules for _, child in _children(module)}
    found: list[nn.Module] = []
    reached: set[int] = set()
    for module in sorted(modules, key=lambda module: id(module) in below):
        if id(module) not in reached:
            found.append(module)
            reached.update(id(inner) for _, inner in _modules(module))
    return found


def _parameters_of(groups: object) -> Iterator[Tensor]:
    for group in _values(groups):
        for _, value in _pairs(group):
            yield from (t for t in _values(value) if is_kind(type(t), Tensor))


def _pairs(mapping: Any) -> list[tuple[Any, Any]]:
    # dict's own items(): a subclass may run code of the user's.
    return list(dict.items(mapping)) if is_kind(type(mapping), dict) else []


def _items(mapping: object) -> list[tuple[str, Any]]:
    return [
        (key if type(key) is str else str(index), v)
        for index, (key, v) in enumerate(_pairs(mapping))
    ]


def _values(sequence: Any) -> list[Any]:
    return list(sequence) if type(sequence) in _SEQUENCES else []


def _tensors_in(value: Any, name: str, depth: int = _MAX_DEPTH) -> Iterator[tuple[str, Tensor]]:
    if is_kind(type(value), Tensor):
        yield name, value
    elif depth:
        for key, inner in _items(value):
            yield from _tensors_in(inner, f"{name}.{key}", depth - 1)
        for index, inner in enumerate(_values(value)):
            yield from _tensors_in(inner, f"{name}[{index}]", depth - 1)
