"""How modules show device tensors inside their forwards, and stay what they are for all others.

Invariant: the registered objects never leave a module's dictionaries. What reads them by name or in
a loop is given what the pager shows in their place; what bypasses these methods gets the host's.
Undone, each module is as it was before, with all that was registered meanwhile.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import ItemsView, Iterator, ValuesView
from typing import Any

from torch import Tensor, nn

from tenure._containers import mapped, tensors_in
from tenure._errors import PagingError
from tenure._torch.modules import is_assigning, is_saving

from .._model import HostTensor, TensorTable
from ._pager import Pager

_Entries = dict[str, Tensor | None]
_OWN_NAMES = frozenset(vars(nn.Module()))
REGISTRIES = ("_parameters", "_buffers")
"""The dictionaries of a module that hold its tensors."""


class PagedDict(_Entries):
    """A module's parameters or buffers, shown where the reader is.

    Args:
        entries: the module's own dictionary.
        hosts: the paged tensors among them, by name.
        pager: what shows them.
    """

    __slots__ = ("_hosts", "_pager")

    def __init__(self, entries: _Entries, hosts: dict[str, HostTensor], pager: Pager) -> None:
        super().__init__(entries)
        self._hosts = hosts
        self._pager = pager

    def __getitem__(self, name: str) -> Tensor | None:
        return self._shown(name, super().__getitem__(name))

    def get(self, name: str, default: Any = None) -> Any:
        """Return an entry as a dictionary does."""
        return self[name] if name in self else default  # noqa: SIM401  # this is that method

    def items(self) -> ItemsView[str, Tensor | None]:  # type: ignore[override]
        """Return the shown items; a state dict always gets host tensors.

        Raises:
            PagingError: ``load_state_dict(assign=True)`` asks; nothing was loaded.
        """
        caller = sys._getframe(1)
        if is_assigning(caller):
            raise PagingError(
                "load_state_dict(assign=True) was called of a model that is paged: the parameters "
                "that it registers would not be. Nothing was loaded. Leave assign=True out, which "
                "copies the values, or call unpage() first."
            )
        # A checkpoint that a callback saves in the middle of a forward must not have tensors on the
        # device, which are others' a moment later.
        if is_saving(caller) and self._pager.is_inside:
            return self._saved().items()
        return {name: self._shown(name, entry) for name, entry in super().items()}.items()

    def values(self) -> ValuesView[Tensor | None]:  # type: ignore[override]
        """Return the shown values."""
        return dict(self.items()).values()

    def __setitem__(self, name: str, entry: Tensor | None) -> None:
        # A forward may count by `self.count = self.count + 1`: the new tensor is on the device, and
        # to register it would lose the host's.
        host = self._hosts.get(name)
        if (
            host is not None
            and entry is not None
            and (entry.shape, entry.dtype) == (host.tensor.shape, host.tensor.dtype)
            and self._pager.is_inside
        ):
            is_registered = super().get(name) is host.tensor
            if self._pager.assign(host, entry, may_stand=is_registered):
                entry = host.tensor
        super().__setitem__(name, entry)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Entries:
        return copy.deepcopy(self._saved(), memo)

    def __reduce__(self) -> tuple[type[_Entries], tuple[_Entries]]:
        return dict, (self._saved(),)

    def registered(self) -> _Entries:
        """Return the registered objects, with replacements on the device moved back."""
        return {
            name: entry if entry is None or name not in self._hosts else _at_home(entry)
            for name, entry in super().items()
        }

    def _saved(self) -> _Entries:
        """Return the registered objects with what a forward that runs has written so far."""
        entries = dict(super().items())
        if self._pager.is_inside:
            assigned = self._pager.save()
            for name, host in self._hosts.items():
                if host in assigned and entries.get(name) is host.tensor:
                    entries[name] = assigned[host].detach().cpu()
        return entries

    def _shown(self, name: str, entry: Tensor | None) -> Tensor | None:
        host = self._hosts.get(name)
        if host is None or host.tensor is not entry:
            return entry
        return self._pager.show(host)


class PagedModule:
    """A module that shows its tensors where they are read, until that is undone.

    Its lists and dictionaries that hold parameters, as those of recurrent layers do, hold what the
    pager shows while its forward runs.

    Args:
        module: the module.
        table: the tensors of its model.
        pager: what shows them.
    """

    def __init__(self, module: nn.Module, table: TensorTable, pager: Pager) -> None:
        self._module, self._hosts, self._pager = weakref.ref(module), table.hosts, pager
        self._originals: dict[str, _Entries] = {}
        self._names = []
        for name, value in vars(module).items():
            found = [] if name in _OWN_NAMES else tensors_in([value])
            hosts = [host for each in found if (host := self.host_of(each)) is not None]
            if hosts:
                self._names.append(name)
            for host in hosts:
                host.is_shared = True
        for registry in REGISTRIES:
            entries = module.__dict__[registry]
            own = {name: table.hosts[id(t)] for name, t in entries.items() if t is not None}
            if own:
                self._originals[registry] = entries
                module.__dict__[registry] = PagedDict(entries, own, pager)

    def show(self, module: nn.Module) -> None:
        """Show parameters in lists and dictionaries on the device until the forward ends."""
        if self._names:
            saved = {name: vars(module)[name] for name in self._names if name in vars(module)}
            self._pager.on_leave(lambda: vars(module).update(saved))
            for name, value in saved.items():
                # torch's recurrent layers keep `_flat_weights`, a list, beside their parameters,
                # and hand that to the kernel.
                vars(module)[name] = mapped(self._shown, value)

    def strangers(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Return what a module and those inside have registered since the model was paged."""
        for prefix, inside in module.named_modules():
            for registry in REGISTRIES:
                for name, tensor in dict.items(vars(inside)[registry]):
                    if tensor is not None and self.host_of(tensor) is None:
                        yield f"{prefix}.{name}".lstrip("."), tensor

    def host_of(self, value: Tensor) -> HostTensor | None:
        """Return the host tensor that a tensor is."""
        host = self._hosts.get(id(value))
        return host if host is not None and host.tensor is value else None

    def undo(self) -> None:
        """Put the module's own dictionaries back, with all that was registered meanwhile."""
        module = self._module()
        while module is not None and self._originals:
            registry, original = next(iter(self._originals.items()))
            paged = module.__dict__[registry]
            # Somebody may have put a dictionary of their own there meanwhile: then that stays.
            if isinstance(paged, PagedDict):
                entries = paged.registered()
                # The same dictionary as before: a reference to it may be held elsewhere.
                original.clear()
                original.update(entries)
                module.__dict__[registry] = original
            del self._originals[registry]

    def _shown(self, value: Tensor) -> Tensor:
        host = self.host_of(value)
        return value if host is None else self._pager.show(host)


def _at_home(entry: Tensor) -> Tensor:
    if entry.device.type == "cpu" or isinstance(entry, nn.Parameter):
        return entry
    return entry.cpu()
