"""How calls of a paged model begin and end: an entry for each module and for each named method.

An entry is called in the place of a module's ``_call_impl``, which runs its hooks and its forward,
so that hooks see the device, too. A dictionary of the pager's would end a graph of compiled code at
each look: while that runs, its modules have plain dictionaries of what is shown, and no entries.

Invariant: an entry leaves the pager when its call ends, however that ends. It keeps no model alive,
and a copy of the model has the method itself.
"""

from __future__ import annotations

import gc
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeGuard

from torch import Tensor, nn

from tenure._errors import PagingError
from tenure._torch.compiler import breaks_graphs, has_compiled, is_compiled, never_compiled
from tenure._torch.modules import module_called_by_torch
from tenure._torch.quiet import aside
from tenure._torch.writes import counter_of

from .._device import Forward
from .._model import Cut, HostTensor, TensorTable, Unit
from ._arguments import Arguments
from ._binding import REGISTRIES, PagedDict, PagedModule
from ._pager import Pager

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
        self._others: list[tuple[weakref.ref[nn.Module], PagedModule]] = []
        self._units: weakref.WeakKeyDictionary[nn.Module, list[Unit]] = weakref.WeakKeyDictionary()
        for module, hosts in table.direct.items():
            self._units[module] = [unit for host in hosts for unit in host.units]
            # A module that leads no unit may still read tensors of its own beside its children's.
            units = pieces.needs.get(module) or _bracketed(hosts)
            paged = PagedModule(module, table, pager)
            self._modules.append(paged)
            if units or hosts or module in wanted:
                names = [method.name for method in methods if method.module is module]
                self._enter(module, names, units, paged)
            else:
                self._others.append((weakref.ref(module), paged))
        self.look()

    def look(self) -> None:
        """Give an entry to what was compiled since the last look."""
        # If dynamo is not loaded, nothing is compiled.
        if has_compiled():
            for other in list(self._others):
                module, paged = other[0](), other[1]
                if module is not None and is_compiled(module):
                    self._others.remove(other)
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
                if isinstance(own.get(name), Entry):
                    self._pager.on_leave(_without_entry(each, name))
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


def _bracketed(hosts: list[HostTensor]) -> list[Unit]:
    """Return the units of a module's own tensors that its forward may hold until it ends."""
    units = dict.fromkeys(host.unit for host in hosts)
    return [unit for unit in units if unit is not None and not unit.is_loose]


def _without_entry(module: nn.Module, name: str) -> Callable[[], object]:
    """Have a module without an entry; what puts it back."""
    own = vars(module)
    entry = own[name]
    entry.remove()
    return lambda: own.update({name: entry})


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
