"""Kinds of state that an attempt may change: several as one, and random state of what code uses.

Invariant: between ``begin`` and the end of an attempt, ``undo`` brings back what was there at
``begin``, however far the attempt came, and allocates no device memory.
"""

from __future__ import annotations

import functools
import importlib
import operator
import pickle
import random
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import FunctionType, MethodType, ModuleType
from typing import Any, Protocol

import torch
from torch import nn

from tenure._devices import NO_ACCELERATOR
from tenure.scopes import persist


class Rollback(Protocol):
    """One kind of state."""

    def begin(self) -> None:
        """Note the state, right before an attempt."""

    def finish(self) -> None:
        """Make the change of an attempt that returned last; it may fail, and is then undone.

        What allocates comes before what can't be undone.
        """

    def undo(self) -> None:
        """Bring the state back."""


class AllOf:
    """Several kinds of state, and whether gradients are on, as one; undone from last to first."""

    __slots__ = ("_has_gradients", "_parts")

    def __init__(self, parts: Iterable[Rollback]) -> None:
        self._parts = tuple(parts)

    def begin(self) -> None:
        """Note each state; if one fails, those noted before it are brought back."""
        self._has_gradients = torch.is_grad_enabled()
        begun: list[Rollback] = []
        try:
            for part in self._parts:
                part.begin()
                begun.append(part)
        # a state may run out of memory while it is noted, as copies of buffers do
        except BaseException:
            self.undo(begun)
            raise

    def finish(self) -> None:
        """Let each make its change last."""
        for part in self._parts:
            part.finish()

    def undo(self, begun: Iterable[Rollback] | None = None) -> None:
        """Bring each state back, whatever becomes of another.

        Args:
            begun: those that were noted; None: all.
        """
        # half of a state brought back is worse than none, and harder to see
        with ExitStack() as stack:
            # last: the others take blocks without gradients, whose end an interrupt may skip
            stack.callback(torch.set_grad_enabled, self._has_gradients)
            for part in self._parts if begun is None else begun:
                stack.callback(part.undo)


# --- random state

_NUMPY = "numpy.random"
_Noted = tuple[Any, Callable[[], Any], Callable[[Any], object]]
"""A state, and how a generator's is read and set."""
Generator = Any
"""One of torch, of Python's `random`, or of NumPy, which may not be installed."""


def generators_in(values: Iterable[object]) -> list[Generator]:
    """Return the generators among some values."""
    values, kinds = [*values], generator_kinds()
    found = []
    # thousands of attributes are of a few types
    types: Iterable[type] = ()
    try:
        types = dict.fromkeys(map(type, values))
    # a metaclass may have no hash
    except TypeError:
        types = {id(kind): kind for kind in map(type, values)}.values()
    for kind in types:
        if issubclass(kind, kinds):
            found += [value for value in values if type(value) is kind]
    return found


def generators_of(objects: Iterable[Any], values: Iterable[object] = ()) -> list[Generator]:
    """Return the generators that modules hold, those that code may use, and those among values.

    Code may use the variables of the Python modules that it is from, and of those that these
    import, or import a function from.

    Args:
        objects: modules and functions.
        values: anything else.
    """
    objects, variables = [*objects], list[Any]()
    known: set[str] = set()
    for users in (objects, variables):
        homes = homes_of(users) - known
        known |= homes
        for name in sorted(homes):
            # at once: another thread may set a variable meanwhile
            variables += vars(sys.modules[name]).values()
    for each in objects:
        if issubclass(type(each), nn.Module):
            variables += vars(each).values()
    return generators_in([*values, *variables])


def generator_kinds() -> tuple[type, ...]:
    """Return the classes of generators; NumPy's only if it is loaded."""
    home = sys.modules.get(_NUMPY)
    # half imported, on another thread, it has neither
    of_numpy = getattr(home, "Generator", None), getattr(home, "RandomState", None)
    return torch.Generator, random.Random, *filter(None, of_numpy)


class RngState:
    """torch's default generators, Python's, numpy's where it is loaded, and the user's own.

    Of torch's: that of the CPU, and those of all accelerators, unless they have not been used yet,
    whichever is current: a part may move its work to any.

    Args:
        devices: devices whose work uses random numbers, accelerators of another kind among them.
        generators: generators of the user's own.
        replays: whether the same numbers are drawn again later, so that NumPy's generator is loaded
            to note it. What begins anew may draw others, where nobody has seeded it; to read its
            state takes longer than all other states.
    """

    __slots__ = ("_devices", "_generators", "_knows_numpy", "_noted", "_replays")

    def __init__(
        self,
        devices: Iterable[torch.device] = (),
        generators: Iterable[Generator] = (),
        *,
        replays: bool = True,
    ) -> None:
        self._replays, self._knows_numpy = replays, True
        self._devices = tuple(devices)
        self._generators: list[Generator] = []
        self._noted: list[_Noted] = []
        self._take(generators)

    def begin(self) -> None:
        """Note all states."""
        noted: list[_Noted] = [
            (torch.get_rng_state(), torch.get_rng_state, torch.set_rng_state),
            (random.getstate(), random.getstate, random.setstate),
        ]
        noted += map(_generator, self._generators)
        devices = dict.fromkeys(self._devices)
        # all of them, not the current one: a part may move its work to any
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is not None and _is_initialized(found):
            for index in range(torch.accelerator.device_count()):
                devices[torch.device(found.type, index)] = None
        for device in devices:
            if device.type not in NO_ACCELERATOR:
                # a device may keep its state in tensors, and no scope may let go of them
                with persist():
                    noted.append(_accelerator(device))
        # the work may be the first to ask NumPy for random numbers
        if self._replays and "numpy" in sys.modules:
            importlib.import_module(_NUMPY)
        # half imported, on another thread, it has no such name yet
        numpy_random: Any = sys.modules.get(_NUMPY)
        self._knows_numpy = hasattr(numpy_random, "get_state") and hasattr(
            numpy_random, "set_state"
        )
        if self._knows_numpy:
            get_state = numpy_random.get_state
            noted.append((get_state(), get_state, numpy_random.set_state))
        self._noted = noted

    def has_drawn(self, *, elsewhere: bool = False) -> bool:
        """Return whether any numbers were drawn since the states were noted."""
        # what has loaded it since may have drawn
        if not self._knows_numpy and _NUMPY in sys.modules:
            return True
        with persist():
            for state, read, _ in self._noted:
                is_meant = not (elsewhere and isinstance(state, torch.Tensor))
                if is_meant and not _same(read(), state):
                    return True
        return False

    def drew_like(self, other: RngState) -> bool:
        """Return whether the noted states of Python, NumPy and the like are those of another."""
        mine, theirs = (
            [state for state, *_ in each._noted if not isinstance(state, torch.Tensor)]
            for each in (self, other)
        )
        return _same(mine, theirs)

    def add(self, generators: Iterable[Generator]) -> None:
        """Note more of the user's own, before they are used."""
        n_known = len(self._generators)
        self._take(generators)
        self._noted += map(_generator, self._generators[n_known:])

    def _take(self, generators: Iterable[Generator]) -> None:
        """Count in those that are not known: what is known would come back to what it is now."""
        known = set(map(id, self._generators))
        for each in generators:
            # SystemRandom asks the system, and has neither a state nor a way to draw a number again
            if id(each) not in known and not isinstance(each, random.SystemRandom):
                known.add(id(each))
                self._generators.append(each)

    def join(self, later: RngState) -> None:
        """Take in what was noted later, which is put back before its own."""
        self._generators += later._generators
        self._noted = later._noted + self._noted

    def finish(self) -> None:
        """Keep the drawn numbers drawn."""
        self._noted = []

    def undo(self) -> None:
        """Put all states back."""
        with persist():
            for state, _, write in self._noted:
                write(state)


def _generator(generator: Generator) -> _Noted:
    if isinstance(generator, random.Random):
        return generator.getstate(), generator.getstate, generator.setstate
    # of NumPy's newer kind
    bits = getattr(generator, "bit_generator", None)
    if bits is not None:
        return bits.state, lambda: bits.state, lambda state: setattr(bits, "state", state)
    return generator.get_state(), generator.get_state, generator.set_state


def _accelerator(device: torch.device) -> _Noted:
    module: Any = torch.get_device_module(device)
    # Metal has one device and asks for none
    which = () if device.type == "mps" else (device,)

    def read() -> Any:
        return module.get_rng_state(*which)

    return read(), read, lambda state: module.set_rng_state(state, *which)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    # arrays among them have no one truth value
    return pickle.dumps(a) == pickle.dumps(b)


def _is_initialized(device: torch.device) -> bool:
    """Return whether its generator exists; asking one of an unused CUDA would start CUDA."""
    module: Any = torch.get_device_module(device)
    return bool(getattr(module, "is_initialized", lambda: True)())


# --- the Python modules that code is from

_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "tenure"}
"""Their variables hold nothing that a model keeps for itself."""
CACHE = type(functools.lru_cache(len))
_module_of = operator.attrgetter("__module__")


def homes_of(objects: Iterable[Any]) -> set[str]:
    """Return the names of the Python modules that define modules, functions and caches."""
    names: list[Any] = []
    # by identity, because a metaclass may have no hash
    kinds: dict[int, type] = {}
    # a loop without calls: a step asks for all variables of the user's files
    for each in objects:
        kind = type(each)
        if kind is CACHE:
            each = each.__wrapped__
            kind = FunctionType if is_a(each, FunctionType, MethodType) else CACHE
        if kind is FunctionType or kind is MethodType:
            names.append(each.__module__)
        elif kind is ModuleType:
            names.append(each.__name__)
        else:
            kinds[id(kind)] = kind
    for kind in kinds.values():
        if issubclass(kind, nn.Module):
            names += map(_module_of, kind.__mro__)
    found: set[str] = set()
    for name in names:
        if type(name) is str and name in sys.modules and name.partition(".")[0] not in _LIBRARIES:
            found.add(name)
    return found


def variables_of(homes: Iterable[str]) -> list[dict[str, Any]]:
    """Return the variables of Python modules."""
    return [vars(sys.modules[name]) for name in sorted(homes)]


def home_of(value: Any) -> str:
    """Return the name of the Python module that a class or a function is from."""
    name = value.__module__
    return name if type(name) is str else ""


def is_library(name: str) -> bool:
    """Return whether a Python module keeps nothing of a model in its variables."""
    return name.partition(".")[0] in _LIBRARIES


def is_a(value: object, *kinds: type) -> bool:
    """Return `isinstance` by type, because a dead weak proxy raises."""
    return issubclass(type(value), kinds)
