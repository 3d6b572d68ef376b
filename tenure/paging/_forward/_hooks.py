"""How a pager is told that a module's forward, or another of its methods, begins and ends.

Invariant: a hook, and what stands in the place of a method, works for the model that was paged
alone, and keeps it alive no more than a weak reference does. A copy of the model, or what is loaded
from a pickle of it, has the method itself, and hooks that do nothing and take themselves away.
"""

from __future__ import annotations

import copy
import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tenure._errors import PagingError
from tenure._torch.compiler import breaks_graphs
from tenure._torch.modules import calls

from .._model import HostTensor, Unit
from ._arguments import Arguments
from ._pager import Pager

_OWN_NAMES = frozenset(vars(nn.Module()))


class ModuleHooks:
    """The pair of hooks of one module.

    Args:
        module: the module.
        units: what its forward needs.
        hosts: the tensors of its model, by the ``id`` of each.
        pager: whom to tell.
    """

    def __init__(
        self, module: nn.Module, units: list[Unit], hosts: dict[int, HostTensor], pager: Pager
    ) -> None:
        self._pager, self._units = pager, units
        self._module = weakref.ref(module)
        self._on_pass: Callable[[], object] | None = None
        self._handles: tuple[RemovableHandle, ...] = ()
        # Not the hooks themselves: the pager must not hold who holds it.
        self._token = object()
        self._attributes = Attributes(module, hosts, pager)

    def register(self, on_pass: Callable[[], object] | None = None) -> None:
        """Put the hooks in place.

        Args:
            on_pass: called at the begin of each pass that begins with this module.
        """
        module = self._module()
        assert module is not None
        self._on_pass = on_pass
        begin: Any = PagingHook(self.begin)
        end: Any = PagingHook(self.end)
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
        if self._on_pass is not None:
            self._on_pass()
        self._pager.note_given((args, kwargs))
        arguments = Arguments((args, kwargs), "cpu", self._pager.engine.device)
        came_later = partial(self._attributes.strangers, module)
        self._pager.on_leave(arguments.leaving(getattr(module, entry), came_later))
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


class PagingHook:
    """A hook that is left behind when the module is copied or pickled."""

    def __init__(self, function: Any) -> None:
        self._function = function

    @breaks_graphs
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


class Attributes:
    """Lists and dictionaries of a module that hold its parameters, as those of recurrent layers.

    While its forward runs, they hold what the pager shows.
    """

    def __init__(self, module: nn.Module, hosts: dict[int, HostTensor], pager: Pager) -> None:
        self._hosts, self._pager = hosts, pager
        self._names = []
        for name, value in vars(module).items():
            found = (
                [] if name in _OWN_NAMES else [*filter(None, map(self._host_of, _held_by(value)))]
            )
            if found:
                self._names.append(name)
            for host in found:
                host.is_shared = True

    def show(self, module: nn.Module) -> None:
        """Show them on the device until the forward ends."""
        if self._names:
            saved = {name: vars(module)[name] for name in self._names if name in vars(module)}
            self._pager.on_leave(lambda: vars(module).update(saved))
            for name, value in saved.items():
                vars(module)[name] = self._shown(value)

    def strangers(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """What a module and those inside have registered that its model had not when paged."""
        for prefix, inside in module.named_modules():
            for entries in (inside._parameters, inside._buffers):
                for name, tensor in dict.items(entries):
                    if tensor is not None and self._host_of(tensor) is None:
                        yield f"{prefix}.{name}".lstrip("."), tensor

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


class Method(NamedTuple):
    """A method of a module in the model."""

    module: nn.Module
    name: str


class EntryPoint:
    """Stands for a method of one module; while that runs, its weights are seen on the device.

    Args:
        method: the method.
        hooks: those of the module.
    """

    def __init__(self, method: Method, hooks: ModuleHooks) -> None:
        module, name = method
        self._module, self._name, self._hooks = weakref.ref(module), name, hooks
        self._own = vars(module).get(name)
        # A method of the class is called with the module at hand; to keep it bound would keep the
        # module.
        bound = getattr(module, name)
        is_bound = isinstance(bound, types.MethodType) and bound.__self__ is module
        self._function = bound.__func__ if is_bound else None
        self._free = None if is_bound else bound
        self.__name__, self.__doc__ = name, bound.__doc__
        self.__signature__ = _signature_of(bound)
        vars(module)[name] = self

    @breaks_graphs
    @calls("module")
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method, with its inputs on the device as those of a forward."""
        module = self._alive()
        # The end is told in any case, as by a hook that is always called.
        output, safe = None, None
        try:
            given = self._hooks.begin(module, args, kwargs, self._name)
            args, kwargs = given or (args, kwargs)
            output = self._plain(module)(*args, **kwargs)
        finally:
            safe = self._hooks.end(module, args, output)
        return output if safe is None else safe

    def remove(self) -> None:
        """Put the method back."""
        module = self._module()
        if module is not None and vars(module).get(self._name) is self:
            del vars(module)[self._name]
            if self._own is not None:
                vars(module)[self._name] = self._own

    def _plain(self, module: nn.Module) -> Callable[..., Any]:
        if self._function is None:
            return self._free  # type: ignore[return-value]
        return types.MethodType(self._function, module)

    def _alive(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise PagingError(
                f"{self._name}() was called of a paged module that is gone: what stands for the "
                "method does not keep it. Keep the model, or its handle, as long as it is called."
            )
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._plain(self._alive()), memo)

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        return _itself, (self._plain(self._alive()),)


def _itself(method: Any) -> Any:
    return method


def _signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except ValueError:
        # Some functions of C have none.
        return None
