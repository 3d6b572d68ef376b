"""The random state that a failed attempt has used up, and that the next one starts from."""

from __future__ import annotations

import importlib
import pickle
import random
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from tenure._devices import NO_ACCELERATOR
from tenure.scopes import persist


class _NotedRandom(NamedTuple):
    """A state, and how a generator's is read and set."""

    state: Any
    read: Callable[[], Any]
    write: Callable[[Any], object]


Generator = Any
"""One of torch, of Python's `random`, or of NumPy, which may not be installed."""


def generators_in(values: Iterable[object]) -> list[Generator]:
    """Return the generators among some values."""
    values, kinds = [*values], generator_kinds()
    # thousands of attributes are of a few types
    found = {id(kind) for kind in set(map(type, values)) if issubclass(kind, kinds)}
    return [value for value in values if id(type(value)) in found] if found else []


def generator_kinds() -> tuple[type, ...]:
    """Return the classes of generators; NumPy's only if it is loaded."""
    home = sys.modules.get("numpy.random")
    # half imported, on another thread, it has neither
    of_numpy = (getattr(home, name, random.Random) for name in ("Generator", "RandomState"))
    return torch.Generator, random.Random, *of_numpy


class RngState:
    """torch's default generators, Python's, numpy's where it is loaded, and the user's own.

    Of torch's: that of the CPU, and those of all accelerators, unless they have not been used yet,
    whichever is current: a part may move its work to any.

    Args:
        devices: devices whose work uses random numbers, accelerators of another kind among them.
        generators: generators of the user's own.
    """

    __slots__ = ("_devices", "_generators", "_noted")

    def __init__(
        self, devices: Iterable[torch.device] = (), generators: Iterable[Generator] = ()
    ) -> None:
        self._devices = tuple(dict.fromkeys(devices))
        self._generators = _with_state(generators)
        self._noted: list[_NotedRandom] = []

    def begin(self) -> None:
        """Note all states."""
        noted = [
            _now(torch.get_rng_state, torch.set_rng_state),
            _now(random.getstate, random.setstate),
            *map(_generator, self._generators),
        ]
        if devices := self._all_devices():
            # a device may keep its state in tensors, and no scope may let go of them
            with persist():
                noted += map(_accelerator, devices)
        # the work may be the first to ask NumPy for random numbers
        if "numpy" in sys.modules:
            numpy_random: Any = importlib.import_module("numpy.random")
            noted.append(_now(numpy_random.get_state, numpy_random.set_state))
        self._noted = noted

    def has_drawn(self, *, elsewhere: bool = False) -> bool:
        """Return whether any numbers were drawn since the states were noted."""
        noted = [each for each in self._noted if not (elsewhere and _is_of_torch(each))]
        with persist():
            return any(not _same(read(), state) for state, read, _ in noted)

    def add(self, generators: Iterable[Generator]) -> None:
        """Note more of the user's own, before they are used."""
        # one that is known would come back to what it is now
        known = set(map(id, self._generators))
        new = [each for each in _with_state(generators) if id(each) not in known]
        self._generators += new
        self._noted += map(_generator, new)

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

    def _all_devices(self) -> list[torch.device]:
        devices = dict.fromkeys(self._devices)
        # all of them, not the current one: a part may move its work to any, see
        # test_a_retried_part_draws_what_it_had_drawn_on_every_device
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is not None and _is_initialized(found):
            indexes = range(torch.accelerator.device_count())
            devices |= dict.fromkeys(torch.device(found.type, index) for index in indexes)
        return [device for device in devices if device.type not in NO_ACCELERATOR]


def _with_state(generators: Iterable[Generator]) -> list[Generator]:
    # SystemRandom asks the system, and has neither a state nor a way to draw a number again
    found = {id(each): each for each in generators if not isinstance(each, random.SystemRandom)}
    return list(found.values())


def _generator(generator: Generator) -> _NotedRandom:
    if isinstance(generator, random.Random):
        return _now(generator.getstate, generator.setstate)
    # of NumPy's newer kind
    bits = getattr(generator, "bit_generator", None)
    if bits is not None:
        return _now(lambda: bits.state, lambda state: setattr(bits, "state", state))
    return _now(generator.get_state, generator.set_state)


def _accelerator(device: torch.device) -> _NotedRandom:
    module: Any = torch.get_device_module(device)
    # Metal has one device and asks for none
    which = () if device.type == "mps" else (device,)
    return _now(
        lambda: module.get_rng_state(*which), lambda state: module.set_rng_state(state, *which)
    )


def _now(read: Callable[[], Any], write: Callable[[Any], object]) -> _NotedRandom:
    return _NotedRandom(read(), read, write)


def _is_of_torch(noted: _NotedRandom) -> bool:
    return isinstance(noted.state, torch.Tensor)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    # arrays among them have no one truth value
    return pickle.dumps(a) == pickle.dumps(b)


def _is_initialized(device: torch.device) -> bool:
    """Return whether its generator exists; asking one of an unused CUDA would start CUDA."""
    module: Any = torch.get_device_module(device)
    return bool(getattr(module, "is_initialized", lambda: True)())
