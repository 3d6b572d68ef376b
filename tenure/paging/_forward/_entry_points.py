"""Methods that use a module's weights beside its forward, such as ``encode`` and ``decode``.

Invariant: what stands in the place of a method keeps the module alive no more than a weak reference
does, and a copy of the module has the method itself.
"""

from __future__ import annotations

import copy
import inspect
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from tenure._errors import PagingError
from tenure._torch.modules import calls

from ._hooks import ModuleHooks


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

    @torch.compiler.disable  # type: ignore[untyped-decorator]
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


def checked_methods(model: nn.Module, methods: Iterable[str]) -> list[Method]:
    """The methods of these names, each once; of a module inside the model with its path before it.

    Raises:
        PagingError: a name is no method's, or the method goes on after it has returned.
    """
    if isinstance(methods, str):
        raise PagingError(f"methods= takes names of methods, such as methods=({methods!r},).")
    if not isinstance(methods, Iterable):
        raise PagingError(f"methods={methods!r}: write names of methods, such as ('encode',).")
    return [_checked(model, name) for name in dict.fromkeys(methods)]


def _checked(model: nn.Module, name: object) -> Method:
    path, _, own = name.rpartition(".") if isinstance(name, str) else ("", "", "")
    module = dict(model.named_modules(remove_duplicate=False)).get(path)
    function = None if module is None or not own else getattr(module, own, None)
    if module is None or not callable(function) or isinstance(function, nn.Module):
        where = model if module is None else module
        has = ", ".join(_methods_of(where)) or "none beside forward"
        raise PagingError(
            f"methods= names {name!r}, which is no method of {type(model).__name__} or of a module "
            f"in it. {type(where).__name__} has: {has}."
        )
    plain = inspect.unwrap(function)
    kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    if any(is_kind(plain) for is_kind in kinds):
        raise PagingError(
            f"methods= names {name!r}, which goes on after it has returned: its weights would be "
            "on the host again. Name the methods that it calls."
        )
    return Method(module, own)


def _methods_of(module: nn.Module) -> list[str]:
    """The public methods that a module's class adds to those of every module."""
    return [
        name
        for name in dir(type(module))
        if not name.startswith("_")
        and not hasattr(nn.Module, name)
        and inspect.isroutine(inspect.getattr_static(type(module), name))
    ]
