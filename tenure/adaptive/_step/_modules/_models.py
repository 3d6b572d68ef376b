"""The modules of a step: those that a search finds before it runs, and those seen when they run.

Invariant: a module is known before its first line runs, so that what it changes can be noted
first; and each that runs in a split step is judged, however the function got hold of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import chain

from torch import Tensor, nn

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
        # what stands below a root was looked at before the split; other modules are when they run
        self._judged = set(map(id, self.all))
        self._is_given = is_given
        # what is noted, so that it can be taken back: roots, and what the loss uses
        self._known = set(self._judged)
        self._learn(modules_below(each for each in others if id(each) not in self._known))
        self._ran: dict[int, nn.Module] = {}
        self._new: dict[str, nn.Module] = {}
        self._listeners: list[Listener] = []

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
        # the only line that most calls of modules cost
        if id(module) in self._ran:
            return
        # kept, so that its id is that of no other
        self._ran[id(module)] = module
        if id(module) in self._judged:
            return
        below = modules_below([module])
        self._judged.update(map(id, below))
        name = unused(type(module).__name__, self.roots.keys() | self._new.keys())
        self._new[name] = module
        # a model that the user named is what names in reports start from, and nothing is added to
        # it
        if not self._is_given:
            self.roots[name] = module
        # told before its first line runs, or its buffers would be noted too late: see
        # test_buffers_of_a_module_that_no_search_finds_are_written_once
        new = self._learn(below)
        for listener in self._listeners:
            listener(new)

    def _learn(self, modules: list[nn.Module]) -> list[nn.Module]:
        new = [module for module in modules if id(module) not in self._known]
        self._known.update(map(id, new))
        self.all += new
        return new


def generators_of(modules: Iterable[nn.Module], values: Iterable[object] = ()) -> list[Generator]:
    """The generators of random numbers that modules hold, and those among some values."""
    return generators_in(chain(values, *(vars(module).values() for module in modules)))


def named_modules(roots: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Every module at or below the roots, each once, under a name that starts with the root's."""
    seen: set[nn.Module] = set()
    for root_name, root in roots.items():
        for name, module in root.named_modules(memo=seen):
            yield f"{root_name}.{name}" if name else root_name, module


def named_parameters(roots: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of the roots, each once."""
    seen: set[int] = set()
    for root_name, root in roots.items():
        for name, parameter in root.named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{root_name}.{name}", parameter
