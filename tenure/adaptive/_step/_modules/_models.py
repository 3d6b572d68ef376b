"""The modules of a step: those that a search finds before it runs, and those seen when they run.

Invariant: a module is known before its first line runs, so that what it changes can be noted
first; and each that runs in a split step is judged, however the function got hold of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain

from torch import nn

from tenure._torch.modules import modules_told

from ..._callables import unused
from ..._undo import Generator, generators_in, modules_below

Listener = Callable[[list[nn.Module]], object]


class StepModels:
    """What is known of the modules so far.

    Args:
        roots: the modules that the function runs, by name.
        others: further modules that are used, such as those of the loss.
        is_given: whether the user named the roots.

    Attributes:
        roots: those by name, each with what is below it.
        found: those of them that were known before anything ran.
        all: every module that is known, once.
    """

    def __init__(
        self, roots: dict[str, nn.Module], others: Iterable[nn.Module], *, is_given: bool
    ) -> None:
        self.roots = roots
        self.found = roots.copy()
        self.all = modules_below(roots.values())
        self._judged = set(map(id, self.all))
        self._is_given = is_given
        self._known = set(self._judged)
        self._learn(modules_below(each for each in others if id(each) not in self._known))
        self._ran: dict[int, nn.Module] = {}
        self._new: dict[str, nn.Module] = {}
        self._listeners: list[Listener] = []

    def generators(self) -> list[Generator]:
        """The generators of random numbers that they hold."""
        return generators_of(self.all)

    def seeing(self) -> AbstractContextManager[None]:
        """A block in which modules are seen when they run."""
        return modules_told(self._see)

    @contextmanager
    def telling(self, listener: Listener) -> Iterator[None]:
        """A block in which ``listener`` gets the modules that nobody knew, before they run."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def take_new_roots(self) -> dict[str, nn.Module]:
        """The modules that ran and are below no root, by name; each is returned once."""
        new, self._new = self._new, {}
        return new

    def _see(self, module: nn.Module) -> None:
        if id(module) in self._ran:
            return
        self._ran[id(module)] = module  # kept, so that its id is that of no other
        if id(module) in self._judged:
            return
        below = modules_below([module])
        self._judged.update(map(id, below))
        name = unused(type(module).__name__, self.roots.keys() | self._new.keys())
        self._new[name] = module
        if not self._is_given:
            self.roots[name] = module
        new = self._learn(below)
        for listener in self._listeners:
            listener(new)

    def _learn(self, modules: list[nn.Module]) -> list[nn.Module]:
        new = [module for module in modules if id(module) not in self._known]
        self._known.update(map(id, new))
        self.all += new
        return new


def generators_of(modules: Iterable[nn.Module]) -> list[Generator]:
    """The generators of random numbers that modules hold."""
    return generators_in(chain.from_iterable(vars(module).values() for module in modules))
