"""All that a failed attempt changes in modules, noted and brought back together."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from ._attribute_state import AttributeState
from ._buffer_state import BufferState
from ._mode_state import ModeState
from ._rollback import Together


class ModuleState(Together):
    """Attributes and buffers of some modules, and how they are set.

    Args:
        modules: all modules that the work runs, those below others too; what is added to them
            later counts from the next ``begin`` on, and `add` notes it at once.
        with_modes: whether how they are set is noted as well.

    Attributes:
        buffers: the buffers.
    """

    __slots__ = ("_kinds", "buffers")

    def __init__(self, modules: Iterable[nn.Module], *, with_modes: bool = True) -> None:
        self.buffers = BufferState(modules)
        kinds = (AttributeState(modules), self.buffers)
        self._kinds = (ModeState(modules), *kinds) if with_modes else kinds
        super().__init__(self._kinds)

    def add(self, modules: Iterable[nn.Module]) -> None:
        """Note more modules, while an attempt is on its way and before they run in it."""
        for kind in self._kinds:
            kind.add(modules)
