"""Variables of the program that hold graphs of autograd, and containers that it adds to.

Text and numbers alone: no tensor is held once the answer is given.
"""

from __future__ import annotations

import os
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from torch import Tensor

from tenure._callers import is_internal
from tenure._heap import (
    Graphs,
    find_holders,
    instance_attributes,
    is_kind,
    read,
    read_locals,
    type_name,
    walk_nodes,
)
from tenure._torch.autograd import sequence_number

from .._owners import saved_storages
from ._code import carried_names, dead_names, grown_names, inner_codes

_MOST_ITEMS, _MOST_VARIABLES, _MOST_CODES = 16, 64, 2000
_CONTAINERS = (list, dict, set, deque)
_GROWING = frozenset({"heappush", "insort"})
# the name that the last holder of a chain has for the object: ``store`` or ``by['key']``
_CALLED = re.compile(r"(\w+)(?:\[['\"]?(\w*)['\"]?\])?(?:, held by .*)?\Z")
_PARTS_OF_LIBRARIES = ("site-packages", "dist-packages")


@dataclass(frozen=True, slots=True)
class GraphVariable:
    """A variable or attribute that a graph of autograd hangs on.

    Attributes:
        name: as its function says it, an attribute with the class of its object.
        n_bytes: what the graph has saved.
        first: the number of the oldest node of the graph.
        last: that of the newest.
        n_steps: how many backward passes began within the graph, which goes on after them.
        is_past: what runs is not a part of the graph, and nothing reads the variable any more.
        is_carried: a statement reads it and binds it anew: it goes on from step to step.
        is_scalar: it is a single number.
    """

    name: str
    n_bytes: int
    first: int
    last: int
    n_steps: int
    is_past: bool
    is_carried: bool
    is_scalar: bool


def graph_variables(frames: Iterable[FrameType], marks: Sequence[int]) -> list[GraphVariable]:
    """The variables of the program's frames that hold graphs, the largest graph first.

    Args:
        frames: the frames of the program, innermost first.
        marks: the nodes that backward passes began with, by their numbers.
    """
    found: list[GraphVariable] = []
    for frame in frames:
        dead, carried = dead_names(frame), carried_names(frame.f_code)
        for name, plain, t in _tensors_of(frame):
            node = read(t, "grad_fn")
            if node is not None and len(found) < _MOST_VARIABLES:
                is_past = plain in dead and "." not in name
                found.append(_of(name, node, marks, is_past, plain in carried, t.numel() == 1))
    return sorted(found, key=lambda variable: -variable.n_bytes)


def _of(
    name: str, node: Any, marks: Sequence[int], is_past: bool, is_carried: bool, is_scalar: bool
) -> GraphVariable:
    found = (sequence_number(each) for each in walk_nodes([node], {}))
    numbers = [number for number in found if number is not None]
    first, last = min(numbers, default=0), max(numbers, default=0)
    saved = saved_storages(Graphs([node]))
    n_bytes = sum(each.record.n_bytes for each in saved.values() if not each.record.is_leaf)
    n_steps = sum(first <= mark < last for mark in marks)
    return GraphVariable(name, n_bytes, first, last, n_steps, is_past, is_carried, is_scalar)


def _tensors_of(frame: FrameType) -> Iterator[tuple[str, str, Tensor]]:
    """Tensors of a frame: the name, the variable or attribute that it is in, and the tensor."""
    for name, value in read_locals(frame):
        if name == "self":
            label = type_name(type(value))
            for key, inner in list(instance_attributes(value).items()):
                yield from _tensors_in(f"{label}.{key}", key, inner)
        else:
            yield from _tensors_in(name, name, value)


def _tensors_in(name: str, plain: str, value: Any) -> Iterator[tuple[str, str, Tensor]]:
    if is_kind(type(value), Tensor):
        yield name, plain, value
        return
    items: list[Any] = []
    if type(value) in (list, tuple, deque):
        items = list(value)[-_MOST_ITEMS:]
    elif type(value) is dict:
        items = list(value.values())[-_MOST_ITEMS:]
    for item in items:
        # as the state of an LSTM for each of its layers
        inside = item if type(item) is tuple else (item,)
        yield from ((f"{name}[…]", plain, t) for t in inside if is_kind(type(t), Tensor))


# --- containers


def filled_elsewhere(
    frames: Iterable[FrameType], fixed: frozenset[str], grown: frozenset[str]
) -> frozenset[str]:
    """Return names of variables whose containers the program fills under another name.

    For example, a hook fills a list of its closure, which the function that registered it returned.

    Args:
        frames: the frames of the program.
        fixed: the names that it adds nothing to.
        grown: the names that it adds to.
    """
    containers = {
        name: value
        for frame in frames
        for name, value in read_locals(frame)
        if name in fixed and is_kind(type(value), *_CONTAINERS) and _may_hold_tensors(value)
    }
    held = find_holders([*containers.values()], ignore=(containers,))
    return frozenset(
        name
        for name, holders in zip(containers, held, strict=True)
        if any(
            grown.intersection(names) for each in holders for names in _CALLED.findall(each.chain)
        )
    )


def _may_hold_tensors(container: Any) -> bool:
    values = dict.values(container) if is_kind(type(container), dict) else container
    first = next(iter(values), None)
    return is_kind(type(first), Tensor, tuple, *_CONTAINERS)


def names_of_program(frames: Iterable[FrameType]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of variables and attributes that the program adds nothing to, and others.

    Args:
        frames: the frames of the program.
    """
    grown: set[str] = set()
    bound: set[str] = set()
    codes = [*(frame.f_code for frame in frames), *islice(_codes_of_program(), _MOST_CODES)]
    codes += [inner for code in codes for inner in inner_codes(code)]
    # to read them all would take seconds: of a large program nothing is known to be fixed
    if len(codes) > _MOST_CODES:
        return frozenset(), frozenset()
    growing = {code.co_name for code in codes if _grows_an_argument(code)} | _GROWING
    for code in codes:
        grown |= grown_names(code)
        bound.update(code.co_varnames, code.co_names)
        # what is given to a function that adds to one of its arguments
        if growing.intersection(code.co_names):
            grown.update(code.co_varnames, code.co_names)
    return frozenset(bound - grown), frozenset(grown)


def _grows_an_argument(code: CodeType) -> bool:
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return bool(grown_names(code).intersection(arguments) - {"self"})


def _codes_of_program() -> Iterator[CodeType]:
    for name, module in list(sys.modules.items()):
        names = vars(module) if type(module) is ModuleType else {}
        path = names.get("__file__")
        # those of the interpreter have none, and no code
        if path is not None and not is_library_path(path) and not name.startswith("tenure."):
            yield from _codes_in(names)


def _codes_in(names: dict[str, Any]) -> Iterator[CodeType]:
    name = names.get("__name__")
    for found in list(names.values()):
        if type(found) is FunctionType and found.__module__ == name:
            yield found.__code__
        elif isinstance(found, type) and found.__module__ == name:
            methods = (getattr(each, "__func__", each) for each in list(vars(found).values()))
            yield from (each.__code__ for each in methods if type(each) is FunctionType)


def is_library(frame: FrameType) -> bool:
    """Whether the code of a frame is torch's, tenure's, or of an installed library."""
    return is_internal(frame) or is_library_path(frame.f_code.co_filename)


def is_library_path(path: str) -> bool:
    """Whether a file is of Python itself or of an installed library."""
    return path.startswith(_STANDARD) or any(part in path for part in _PARTS_OF_LIBRARIES)


_STANDARD = os.path.dirname(os.__file__)
