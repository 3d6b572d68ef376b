"""The hooks that tell a pager when a module's forward begins and ends.

Invariant: a hook works for the model that was paged alone. A copy of the model, or what is loaded
from a pickle of it, gets hooks that do nothing and take themselves away.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .._model import HostTensor, TensorTable, Unit
from ._arguments import Arguments
from ._pager import Pager

_OWN = frozenset(vars(nn.Module()))


class ModuleHooks:
    """The pair of hooks of one module.

    Args:
        module: the module.
        units: what its forward needs.
        table: the tensors of its model.
        pager: whom to tell.
    """

    def __init__(
        self, module: nn.Module, units: list[Unit], table: TensorTable, pager: Pager
    ) -> None:
        self._pager, self._units = pager, units
        # Not the hooks themselves: the pager must not hold who holds it.
        self._token = object()
        self._attributes = _Attributes(module, table, pager)
        begin: Any = _Hook(self.begin)
        end: Any = _Hook(self.end)
        # Before all other hooks, which may read weights; and also after a forward that raised, or
        # its units would stay in use.
        self._handles = (
            module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True),
            module.register_forward_hook(end, always_call=True),
        )

    def begin(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        entry: str = "forward",
    ) -> tuple[Any, Any] | None:
        """Before the forward: the outermost one gets its inputs on the device."""
        if not self._pager.enter(self._token, self._units, module, entry):
            return None
        self._attributes.show(module)
        # Inside, arguments are where the forward made them; to look through them for each layer
        # would take longer than small layers do.
        if not self._pager.is_outermost:
            return None
        arguments = Arguments((args, kwargs), "cpu", self._pager.engine.device)
        self._pager.on_leave(arguments.leaving(getattr(module, entry)))
        return arguments.given  # type: ignore[no-any-return]

    def end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """After the forward, also one that raised; its output, if that must be another one."""
        safe = self._pager.apart(self._token, output)
        self._pager.leave(self._token)
        return None if safe is output else safe

    def remove(self) -> None:
        """Take both away."""
        for handle in self._handles:
            handle.remove()


class _Hook:
    """A hook that is left behind when the module is copied or pickled."""

    def __init__(self, function: Any) -> None:
        self._function = function

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> LeftBehind:
        return LeftBehind()

    def __reduce__(self) -> tuple[type[LeftBehind], tuple[()]]:
        return LeftBehind, ()


class LeftBehind:
    """What a copy of a paged module has instead of a hook; gone after its first call."""

    def __call__(self, module: nn.Module, *_: Any) -> None:
        """Do nothing, for the last time."""
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if hook is self]:
                del hooks[key]


class _Attributes:
    """Lists and dictionaries of a module that hold its parameters, as those of recurrent layers.

    While its forward runs, they hold what the pager shows.
    """

    def __init__(self, module: nn.Module, table: TensorTable, pager: Pager) -> None:
        self._hosts, self._pager = table.hosts, pager
        self._names = [
            name
            for name, value in vars(module).items()
            if name not in _OWN and any(map(self._host_of, _held_by(value)))
        ]

    def show(self, module: nn.Module) -> None:
        """Show them on the device until the forward ends."""
        if self._names:
            saved = {name: vars(module)[name] for name in self._names if name in vars(module)}
            self._pager.on_leave(lambda: vars(module).update(saved))
            for name, value in saved.items():
                vars(module)[name] = self._shown(value)

    def _host_of(self, value: object) -> HostTensor | None:
        host = self._hosts.get(id(value))
        return host if host is not None and host.tensor is value else None

    def _shown(self, value: Any) -> Any:
        # torch's recurrent layers keep `_flat_weights`, a list, beside their parameters, and hand
        # that to the kernel.
        if isinstance(value, dict):
            return {key: self._shown(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(self._shown, value))
        host = self._host_of(value)
        return value if host is None else self._pager.show(host)


def _held_by(value: Any) -> Iterator[object]:
    if type(value) is dict:
        for each in value.values():
            yield from _held_by(each)
    elif type(value) in (list, tuple):
        for each in value:
            yield from _held_by(each)
    else:
        yield value
