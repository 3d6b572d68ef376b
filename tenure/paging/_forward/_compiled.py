"""Compiled blocks: what they need is brought before, and while they run their weights are plain.

A hook, or a look into a dictionary of the pager's, ends a graph: a block that reads ten weights
would be compiled to ten graphs of nothing. So for the time that compiled code runs, its modules
have plain dictionaries of what is shown, and no hooks of the pager. One graph then serves all
blocks of a kind, which differ in no more than the tensors in these.

Invariant: what the modules have outside of the call is as it was, whatever ended it.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeGuard

from torch import Tensor, nn

from tenure._torch.compiler import breaks_graphs, compiled_attribute, has_compiled
from tenure._torch.modules import calls
from tenure._torch.quiet import aside
from tenure._torch.writes import counter_of

from .._model import TensorTable, Unit
from ._binding import PagedDict
from ._hooks import Attributes, ModuleHooks, PagingHook
from ._pager import Pager

_REGISTRIES = ("_parameters", "_buffers")
_N_COMPILED = 2
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


class CompiledCalls:
    """The compiled callables of a model's modules, found when a pass begins.

    Args:
        table: the model's tensors.
        pager: whom to tell of calls.
    """

    def __init__(self, table: TensorTable, pager: Pager) -> None:
        self._pager, self._hosts = pager, table.hosts
        # Weakly, as all here: hooks hold this, and must not keep the model.
        self._units: weakref.WeakKeyDictionary[nn.Module, list[Unit]] = weakref.WeakKeyDictionary()
        for module, hosts in table.direct.items():
            self._units[module] = [unit for host in hosts for unit in host.units]
        self._calls: list[weakref.ref[CompiledCall]] = []

    def look(self) -> None:
        """Stand for what was compiled since the last look."""
        # Where dynamo is not loaded nothing is compiled.
        if not has_compiled():
            return
        for module in list(self._units):
            name = compiled_attribute(module)
            if name is not None and not isinstance(vars(module)[name], CompiledCall):
                self._calls.append(weakref.ref(self._call(module, name)))

    def undo(self) -> None:
        """Put the callables back."""
        while self._calls:
            call = self._calls.pop()()
            if call is not None:
                call.remove()

    def _call(self, module: nn.Module, name: str) -> CompiledCall:
        inside = [each for each in module.modules() if each in self._units]
        units = list(dict.fromkeys(unit for each in inside for unit in self._units[each]))
        hooks = ModuleHooks(module, units, self._hosts, self._pager)
        attributes = [
            (weakref.ref(each), Attributes(each, self._hosts, self._pager)) for each in inside
        ]
        return CompiledCall(module, name, hooks, units, self._pager, attributes)


class CompiledCall:
    """Stands for a compiled callable of one module.

    Args:
        module: the module.
        name: the attribute that is the callable.
        hooks: told of each call; they are not registered, for those would be compiled.
        units: what they bring.
        pager: the pager.
        attributes: what modules inside hold of their parameters elsewhere.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        hooks: ModuleHooks,
        units: list[Unit],
        pager: Pager,
        attributes: list[tuple[weakref.ref[nn.Module], Attributes]],
    ) -> None:
        self._module, self._name = weakref.ref(module), name
        self._hooks, self._units = hooks, units
        self._pager, self._attributes = pager, attributes
        self._compiled: Any = vars(module)[name]
        self._n_collections = 0
        vars(module)[name] = self

    @breaks_graphs
    @calls("module")
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, with all that it needs on the device."""
        module = self._module()
        assert module is not None
        # The end is told in any case, as by a hook that is always called.
        output, safe = None, None
        try:
            given = self._hooks.begin(module, args, kwargs)
            args, kwargs = given or (args, kwargs)
            with self._plain(module):
                output = self._compiled(*args, **kwargs)
        finally:
            safe = self._hooks.end(module, args, output)
        self._collect()
        return output if safe is None else safe

    def remove(self) -> None:
        """Put the callable back."""
        module = self._module()
        if module is not None and vars(module).get(self._name) is self:
            vars(module)[self._name] = self._compiled

    def _collect(self) -> None:
        """Free what the compiler has left: cycles that hold the weights it was shown.

        A forward is compiled at its first call, and its backward pass at the first of those.
        """
        if self._n_collections < _N_COMPILED and self._pager.holds(self._units):
            self._n_collections += 1
            gc.collect()

    @contextmanager
    def _plain(self, module: nn.Module) -> Iterator[None]:
        """A block in which the modules inside are as those of a model on the device."""
        if not self._pager.is_inside:
            # The model was unpaged while this call waited to get in.
            yield
            return
        with ExitStack() as restores:
            for inside, attributes in self._attributes:
                there = inside()
                if there is not None:
                    attributes.show(there)
            for each in module.modules():
                self._pager.note_mode(each)
                own = vars(each)
                for name in _REGISTRIES:
                    if isinstance(own[name], PagedDict):
                        restores.callback(_show(own, name, is_written=each.training))
                for name in _HOOKS:
                    if any(isinstance(hook, PagingHook) for hook in own[name].values()):
                        restores.callback(_without_hooks(own, name))
            yield


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


def _without_hooks(own: dict[str, Any], name: str) -> Callable[[], None]:
    """Have a dictionary of hooks without the pager's; what ends that."""
    hooks = own[name]
    own[name] = type(hooks)(
        (key, hook) for key, hook in hooks.items() if not isinstance(hook, PagingHook)
    )

    def end() -> None:
        own[name] = hooks

    return end
