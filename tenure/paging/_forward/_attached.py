"""All that stands between a model and its users while it is paged: hooks, dictionaries, methods.

Invariant: it is put in place as a whole, and taken away as a whole, whatever interrupts that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from .._model import Cut, HostTensor, TensorTable, Unit
from ._binding import Binding
from ._compiled import CompiledCalls
from ._hooks import EntryPoint, Method, ModuleHooks
from ._pager import Pager

Hook = Callable[[nn.Module, list[Unit], dict[int, HostTensor], Pager], ModuleHooks]


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
        # What computes on the host, as by another kind of hooks, is compiled as it is written.
        self._compiled = CompiledCalls(table, pager) if hook is ModuleHooks else None
        for module in dict.fromkeys([*modules, *wanted]):
            # A module that leads no unit may still read tensors of its own beside its children's.
            units = pieces.needs.get(module) or _bracketed(table.direct[module])
            if units or table.direct[module] or module in wanted:
                made = self._hooks[module] = hook(module, units, table.hosts, pager)
                made.register(None if self._compiled is None else self._compiled.look)
        self._entries = [EntryPoint(method, self._hooks[method.module]) for method in methods]
        self._bindings = [
            Binding(module, table, pager) for module, hosts in table.direct.items() if hosts
        ]

        if self._compiled is not None:
            self._compiled.look()

    def undo(self) -> None:
        """Take all of it away; nothing the second time."""
        # Taken one by one: where this is interrupted, the next call goes on with the rest.
        if self._compiled is not None:
            self._compiled.undo()
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
