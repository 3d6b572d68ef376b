"""What a paged model is given, and what is taken from it again: hooks, dictionaries, methods.

Invariant: undone, each module is as it was before, with all that was registered meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from .._model import Cut, HostTensor, TensorTable, Unit
from ._binding import Binding
from ._entry_points import EntryPoint, Method
from ._hooks import ModuleHooks
from ._pager import Pager

Hook = Callable[[nn.Module, list[Unit], TensorTable, Pager], ModuleHooks]


class Attached:
    """All that lets a model's modules show what the pager shows, until it is undone.

    Args:
        model: the model.
        table: its tensors.
        pieces: its units.
        pager: the pager.
        modules: those that may be given hooks.
        hook: gives a module its hooks.
        methods: the entry points beside forward; their modules get hooks in any case.
    """

    def __init__(
        self,
        model: nn.Module,
        table: TensorTable,
        pieces: Cut,
        pager: Pager,
        modules: Iterable[nn.Module],
        hook: Hook,
        methods: Iterable[Method] = (),
    ) -> None:
        methods = list(methods)
        wanted = {model, *(method.module for method in methods)}
        self._hooks: dict[nn.Module, ModuleHooks] = {}
        for module in dict.fromkeys([*modules, *wanted]):
            # A module that leads no unit may still read tensors of its own beside its children's.
            units = pieces.needs.get(module) or _bracketed(table.direct[module])
            if units or table.direct[module] or module in wanted:
                self._hooks[module] = hook(module, units, table, pager)
        self._entries = [EntryPoint(method, self._hooks[method.module]) for method in methods]
        self._bindings = [
            Binding(module, table, pager) for module, hosts in table.direct.items() if hosts
        ]

    def undo(self) -> None:
        """Take all of it away; nothing the second time."""
        # Taken one by one: where this is interrupted, the next call goes on with the rest.
        while self._entries:
            self._entries.pop().remove()
        while self._hooks:
            self._hooks.popitem()[1].remove()
        while self._bindings:
            self._bindings.pop().undo()


def _bracketed(hosts: list[HostTensor]) -> list[Unit]:
    """The units of a module's own tensors that its forward may hold until it ends."""
    units = dict.fromkeys(host.unit for host in hosts)
    return [unit for unit in units if unit is not None and not unit.is_loose]
