"""Parameters that a function writes: a teacher that it moves, weights that it clips.

Each micro-batch would write them again, and so would each run that only verifies.

Invariant: in a run that verifies, an operation that would write a parameter raises before it runs.
A parameter that got other data by ``.data =`` gets its own back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tenure._containers import passed_tensors
from tenure._errors import AdaptiveUsageError
from tenure._text import listed
from tenure._torch.modes import EagerMode, schema_of
from tenure._torch.quiet import without_functions
from tenure._torch.storages import key_of
from tenure._torch.writes import version_of

from ..._reachable import named_modules

_PLAIN = (Tensor, nn.Parameter)


class _NotedWrite(NamedTuple):
    name: str
    parameter: Tensor
    data: Tensor
    version: int | None


class WrittenParameters:
    """Whether a function writes parameters.

    Args:
        entry: what was called.
        function: what errors call the function.
        roots: the modules that it runs, by name.

    Attributes:
        error: the last error that was raised.
    """

    def __init__(self, entry: str, function: str, roots: Mapping[str, nn.Module]) -> None:
        self._entry, self._function, self._roots = entry, function, roots
        self._noted: list[_NotedWrite] = []
        self._asks = False
        self.error: AdaptiveUsageError | None = None

    def begin(self, *, asks: bool) -> None:
        """Note them as they are.

        Args:
            asks: whether the run is taken back anyway, so that nothing may be written in it.
        """
        self._asks = asks
        with without_functions():
            self._noted = [
                _NotedWrite(name, each, each.detach(), version_of(each))
                for name, each in self._parameters()
            ]

    def finish(self) -> None:
        """Look no more."""
        self._noted = []

    def guarded(self) -> AbstractContextManager[Any]:
        """Return a block for a call of the function."""
        return _WriteGuard(self) if self._asks and self._noted else nullcontext()

    def check(self) -> None:
        """Make sure that none was written since they were noted.

        Raises:
            AdaptiveUsageError: one was.
        """
        names = []
        with without_functions(), torch.no_grad():
            for name, parameter, data, version in self._noted:
                if _has_other_data(parameter, data):
                    parameter.data = data
                    names.append(name)
                elif version != version_of(parameter):
                    names.append(name)
        self._noted = []
        if names:
            self.refuse(names)

    def refuse(self, names: list[str]) -> None:
        """Say that these would be written.

        Raises:
            AdaptiveUsageError: always.
        """
        self.error = AdaptiveUsageError(
            f"{self._function!r} writes the parameter {listed(names, most=3)}. Where "
            f"{self._entry}() splits the batch, each micro-batch would do so again, and so would "
            "each run that verifies the split. No gradient was delivered. Move a teacher, or clip "
            f"weights, after {self._entry}() or before it."
        )
        raise self.error

    def named_storages(self) -> dict[int, str]:
        """Return the names of the parameters that were noted, by the keys of their storages."""
        return {key_of(each.data.untyped_storage()): each.name for each in self._noted}

    def _parameters(self) -> Iterable[tuple[str, Tensor]]:
        seen: set[int] = set()
        for name, module in named_modules(self._roots):
            # looking rows up renormalizes them, again to the same
            if getattr(module, "max_norm", None) is not None:
                continue
            for key, each in module._parameters.items():
                # of other classes nobody knows what a write is: sharded, quantized, without data
                if each is None or type(each) not in _PLAIN or is_lazy(each):
                    continue
                if id(each) not in seen:
                    seen.add(id(each))
                    yield f"{name}.{key}", each


def _has_other_data(parameter: Tensor, data: Tensor) -> bool:
    if type(parameter) not in _PLAIN or parameter.is_meta:
        return False
    if parameter.data_ptr() == data.data_ptr():
        return False
    # a pager moves parameters, and a quantized layer lays them out anew
    kinds = [(each.shape, each.dtype, each.device, each.layout) for each in (parameter, data)]
    return kinds[0] == kinds[1] and not torch.equal(parameter, data)


class _WriteGuard(EagerMode):
    """Raises where an operation is about to write a parameter."""

    supports_higher_order_operators = True

    def __init__(self, written: WrittenParameters) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch left it unannotated
        self._written = written
        self._names = written.named_storages()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = schema_of(func)
        if schema is not None and schema.is_mutable:
            given = {**dict(zip((a.name for a in schema.arguments), args, strict=False)), **kwargs}
            written = [
                given.get(each.name)
                for each in schema.arguments
                if each.alias_info is not None and each.alias_info.is_write
            ]
            for tensor in passed_tensors(written):
                if type(tensor) in _PLAIN and tensor.layout is torch.strided:
                    name = self._names.get(key_of(tensor.untyped_storage()))
                    if name is not None:
                        self._written.refuse([name])
        return func(*args, **kwargs)
