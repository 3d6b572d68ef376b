"""How calls of a paged model begin and end: an entry for each module and for each named method.

An entry is called in the place of a module's ``_call_impl``, which runs its hooks and its forward,
so that hooks see the device, too. A dictionary of the pager's would end a graph of compiled code at
each look: while that runs, its modules have plain dictionaries of what is shown, and no entries.

Invariant: the registered objects never leave a module's dictionaries. What reads them by name or in
a loop is given what the pager shows in their place; what bypasses these methods gets the host's. An
entry leaves the pager when its call ends, however that ends. It keeps no model alive, and a copy of
the model has the method itself. Undone, each module is as it was before, with all that was
registered meanwhile.
"""

from __future__ import annotations

import copy
import gc
import inspect
import sys
import types
import weakref
from collections.abc import Callable, ItemsView, Iterable, Iterator, ValuesView
from functools import partial
from typing import Any, NamedTuple, TypeGuard

from torch import Tensor, nn

from tenure._containers import mapped, tensors_in
from tenure._errors import PagingError
from tenure._torch.compiler import breaks_graphs, has_compiled, is_compiled, never_compiled
from tenure._torch.modules import is_assigning, is_saving, module_called_by_torch
from tenure._torch.quiet import aside
from tenure._torch.writes import counter_of

from ._arguments import Arguments
from ._division import Cut
from ._pager import Pager
from ._pass import Forward
from ._tensors import HostTensor, TensorTable, Unit

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
            PagingError: ``load_state_dict(assign=True)`` asks, and the state dict has one of these.
        """
        caller = sys._getframe(1)
        if is_assigning(caller, self._hosts):
            raise PagingError(
                "load_state_dict(assign=True) was called of a model that is paged: the parameters "
                "that it registers would not be. Leave assign=True out, which copies the values, "
                "or call unpage() first."
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
            name: entry
            if entry is None or name not in self._hosts or isinstance(entry, nn.Parameter)
            else entry.cpu()
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

    Attributes:
        module: refers to it.
    """

    def __init__(self, module: nn.Module, table: TensorTable, pager: Pager) -> None:
        self.module, self._hosts, self._pager = weakref.ref(module), table.hosts, pager
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
        module = self.module()
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


_CALL = "_call_impl"
_COMPILED_CALL = "_compiled_call_impl"
_CALLS = (_CALL, _COMPILED_CALL)
_N_COMPILED = 2


class Method(NamedTuple):
    """A method of a module in the model."""

    module: nn.Module
    name: str


class Attached:
    """All that stands between a model and its users while it is paged: dictionaries and entries.

    Args:
        model: the model.
        table: its tensors.
        pieces: its units.
        pager: the pager.
        methods: those beside the forward.
    """

    def __init__(
        self,
        model: nn.Module,
        table: TensorTable,
        pieces: Cut,
        pager: Pager,
        methods: Iterable[Method] = (),
    ) -> None:
        methods = list(methods)
        wanted = {model, *(method.module for method in methods)}
        self.pager = pager
        # Weakly, here and below: entries hold this, and must not keep the model or each other.
        self._entries: list[weakref.ref[Entry]] = []
        self._modules: list[PagedModule] = []
        self._others: list[PagedModule] = []
        self._units: weakref.WeakKeyDictionary[nn.Module, list[Unit]] = weakref.WeakKeyDictionary()
        for module, hosts in table.direct.items():
            self._units[module] = [unit for host in hosts for unit in host.units]
            # A module that leads no unit may still read tensors of its own beside its children's.
            # Its forward may hold them until it ends.
            own = dict.fromkeys(host.unit for host in hosts)
            units = pieces.needs.get(module) or [u for u in own if u is not None and not u.is_loose]
            paged = PagedModule(module, table, pager)
            self._modules.append(paged)
            if units or hosts or module in wanted:
                names = [method.name for method in methods if method.module is module]
                self._enter(module, names, units, paged)
            else:
                self._others.append(paged)
        self.look()

    def look(self) -> None:
        """Give an entry to what was compiled since the last look."""
        # If dynamo is not loaded, nothing is compiled.
        if has_compiled():
            for paged in list(self._others):
                module = paged.module()
                if module is not None and is_compiled(module):
                    self._others.remove(paged)
                    self._enter(module, [], [], paged)

    def units_inside(self, module: nn.Module) -> list[Unit]:
        """Return all units that a module and its submodules need."""
        inside = (unit for each in module.modules() for unit in self._units.get(each, ()))
        return list(dict.fromkeys(inside))

    def undo(self) -> None:
        """Take all of it away; nothing the second time."""
        # One by one: if this is interrupted, the next call goes on with the rest.
        while self._entries:
            entry = self._entries[-1]()
            if entry is not None:
                entry.remove()
            self._entries.pop()
        while self._modules:
            self._modules[-1].undo()
            self._modules.pop()

    def _enter(
        self, module: nn.Module, methods: list[str], units: list[Unit], paged: PagedModule
    ) -> None:
        compiled = [_COMPILED_CALL] if vars(module).get(_COMPILED_CALL) else []
        for name in (_CALL, *compiled, *methods):
            entry = Entry(module, name, units, self, paged)
            self._entries.append(weakref.ref(entry))


class Entry:
    """Is called in the place of a method of one module, and shows its weights on the device.

    Args:
        module: the module.
        name: the method.
        units: what it needs.
        attached: what it is part of.
        paged: the module, as it shows its tensors.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        units: list[Unit],
        attached: Attached,
        paged: PagedModule,
    ) -> None:
        self.paged = paged
        self._module, self._name = weakref.ref(module), name
        self._attached, self._pager, self._units = attached, attached.pager, units
        # It would remove this entry at its first call.
        if isinstance(vars(module).get(name), LeftBehind):
            del vars(module)[name]
        self._own = vars(module).get(name)
        # A method of the class is called with the module at hand; to keep it bound would keep the
        # module.
        bound = getattr(module, name)
        is_bound = isinstance(bound, types.MethodType) and bound.__self__ is module
        self._function = bound.__func__ if is_bound else None
        self._free = None if is_bound else bound
        # Not the entry itself: the pager must not hold who holds it.
        self._token = object()
        self._n_collections = 0
        self.__name__, self.__doc__ = name, bound.__doc__
        self.__signature__ = _signature_of(bound)
        # What torch.compile asks of a function.
        self.__code__ = getattr(bound, "__code__", None)
        vars(module)[name] = self

    @breaks_graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method, the outermost one with its inputs on the device."""
        module = self._module_called(sys._getframe(1))
        call, forward, arguments = self._plain(module), Forward(), None
        try:
            try:
                try:
                    arguments = self._begin(module, forward, (args, kwargs))
                    if arguments is not None:
                        args, kwargs = arguments.given
                    output = self._pager.result(forward, call(*args, **kwargs))
                    forward.has_completed = True
                finally:
                    self._pager.leave(forward)
            finally:
                # The first may have been interrupted.
                self._pager.leave(forward)
        except RuntimeError as error:
            if arguments is not None:
                function = module.forward if self._name in _CALLS else call
                arguments.explain(error, function, self.paged.strangers(module))
            raise
        if forward.is_compiled:
            self._collect(module)
        return output

    def remove(self) -> None:
        """Put the method back."""
        module = self._module()
        if module is not None and vars(module).get(self._name) is self:
            if self._own is None:
                del vars(module)[self._name]
            else:
                vars(module)[self._name] = self._own

    @never_compiled
    def _plain(self, module: nn.Module) -> Callable[..., Any]:
        if self._function is None:
            return self._free  # type: ignore[return-value]
        return types.MethodType(self._function, module)

    @never_compiled
    def _begin(self, module: nn.Module, forward: Forward, given: Any) -> Arguments | None:
        forward.is_compiled = self._name in _CALLS and is_compiled(module)
        units = self._attached.units_inside(module) if forward.is_compiled else self._units
        if not self._pager.enter(forward, self._token, units, module):
            return None
        if self._pager.is_outermost:
            self._attached.look()
        if forward.is_compiled:
            self._show_plainly(module)
        else:
            self.paged.show(module)
        return self._pager.arguments(forward, given)

    def _show_plainly(self, module: nn.Module) -> None:
        """Have the modules inside as those of a model on the device, until the forward ends."""
        for each in module.modules():
            self._pager.note_mode(each)
            own = vars(each)
            entry = own.get(_CALL)
            if isinstance(entry, Entry):
                entry.paged.show(each)
            for name in _CALLS:
                if isinstance(entry := own.get(name), Entry):
                    self._pager.on_leave(partial(own.update, {name: entry}))
                    entry.remove()
            for name in REGISTRIES:
                if isinstance(own[name], PagedDict):
                    self._pager.on_leave(_show(own, name, is_written=each.training))

    @never_compiled
    def _collect(self, module: nn.Module) -> None:
        """Free what the compiler has left: cycles that hold the weights it was shown.

        A forward is compiled at its first call, and its backward pass at the first of those.
        """
        if self._n_collections < _N_COMPILED and self._pager.holds(
            self._attached.units_inside(module)
        ):
            self._n_collections += 1
            gc.collect()

    @never_compiled
    def _module_called(self, caller: types.FrameType) -> nn.Module:
        # A shallow copy of the module has its dictionary, with this entry.
        module = module_called_by_torch(caller) if self._name == _CALL else None
        return _alive(self._module, self._name) if module is None else module

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        if self._own is not None:
            return _itself, (self._own,)
        return LeftBehind, (self._module(), self._name)


class LeftBehind:
    """What a copy of a paged module has instead of an entry; gone after its first call."""

    def __init__(self, module: nn.Module, name: str) -> None:
        # Weakly: a copy of the model is freed without a collection.
        self._module, self._name = weakref.ref(module), name

    @property
    def __self__(self) -> nn.Module | None:
        return self._module()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method of the class, from now on without this."""
        module = _alive(self._module, self._name)
        vars(module).pop(self._name, None)
        return getattr(module, self._name)(*args, **kwargs)

    def __reduce__(self) -> tuple[type[LeftBehind], tuple[nn.Module | None, str]]:
        return LeftBehind, (self._module(), self._name)


def _alive(reference: weakref.ref[nn.Module], name: str) -> nn.Module:
    module = reference()
    if module is None:
        raise PagingError(
            f"{name}() was called of a paged module that is gone: what stands for the method does "
            "not keep it. Keep the model, or its handle, as long as it is called."
        )
    return module


def _show(own: dict[str, Any], name: str, *, is_written: bool) -> Callable[[], None]:
    """Have a plain dictionary of what is shown in the place of a paged one.

    Args:
        own: the attributes of a module.
        name: the one that is the dictionary.
        is_written: whether kernels may write its buffers without raising their versions.

    Returns:
        What ends that.
    """
    paged: PagedDict = own[name]
    shown = dict(paged.items())
    # A graph that writes tensors which share a storage, as all of a unit do, is refused by torch:
    # counters and statistics, which are small, are copies meanwhile.
    with aside():
        copies = {key: t.clone() for key, t in shown.items() if name == "_buffers" and _is_small(t)}
    versions = {key: counter_of(each) for key, each in copies.items()}
    given = {**shown, **copies}
    plain = own[name] = dict(given)

    def end() -> None:
        own[name] = paged
        for key, entry in plain.items():
            is_same = entry is given.get(key)
            is_unwritten = key not in copies or (
                counter_of(copies[key]) == versions[key] and not is_written
            )
            # What the forward has assigned, or written to a copy, comes home as it does elsewhere.
            if not (is_same and is_unwritten):
                paged[key] = entry
        # A guard of compiled code may know the dictionary, and would keep the bytes.
        for each in (plain, given, shown):
            each.clear()

    return end


def _is_small(tensor: Tensor | None) -> TypeGuard[Tensor]:
    return tensor is not None and tensor.dim() <= 1 and type(tensor) is not nn.Parameter


def _itself(method: Any) -> Any:
    return method


def _signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        # Some functions of C have none.
        return None
