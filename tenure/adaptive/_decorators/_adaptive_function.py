"""A function whose calls are tried again: what decorated functions of all kinds have in common.

Invariant: it looks like the function it wraps, binds to instances and classes as that does, and all
that is bound shares one memory of sizes.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, Self

from torch import Tensor

from tenure._errors import AdaptiveUsageError

from .._callables import check_function, name_of
from .._sizes import (
    CacheType,
    RememberedCall,
    RemembersNothing,
    checked_initial,
    remembered_of,
)
from ._options import Options


class _Owner:
    """What sizes are remembered for: a decorated function, of which it holds nothing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__module__ = getattr(function, "__module__", "")
        self.__qualname__ = getattr(function, "__qualname__", "")

    def __deepcopy__(self, memo: object) -> Self:
        return self  # copies in a process share their sizes


class AdaptiveFunction:
    """A function, and how its calls are run."""

    _entry = "tenure.adaptive"
    _initial_name = "initial_batchsize"

    def __init__(self, function: Callable[..., Any], initial: int | None, options: Options) -> None:
        if isinstance(function, int):
            raise AdaptiveUsageError(
                f"@{self._entry} wants a function, and got {function!r}. For a size to begin with, "
                f"write @{self._entry}({self._initial_name}={function!r})."
            )
        check_function(f"@{self._entry}", _plain(function))
        wrapper: Any = self
        vars(self).update(_attributes_of(function, type(self)))
        functools.update_wrapper(wrapper, function, updated=())
        self._function = function
        self._name = name_of(_plain(function))
        self._options = options
        self._initial = checked_initial(self._initial_name, initial, options.limits)
        self._owner = _Owner(function)
        self._class_name = _class_of_method(_plain(function))

    def _bound(self, instance: object, owner: type | None) -> Any:
        """The same function, bound as the wrapped one is."""
        bind = getattr(type(self._function), "__get__", None)
        if bind is None:
            return self
        function = bind(self._function, instance, owner)
        if function is not self._function:
            return self._with(function)
        return self if owner is None else _OfClass(self, owner)

    def _is_method_of(self, first: object) -> bool:
        """Whether the first argument of a call is the ``self``, or ``cls``, of this very method.

        What stands above it in the class, such as ``@torch.no_grad()``, passes it on like that.
        """
        kinds = first.__mro__ if isinstance(first, type) else type(first).__mro__
        name, module = self._class_name, vars(self)["__module__"]
        return any(kind.__qualname__ == name and kind.__module__ == module for kind in kinds)

    def __repr__(self) -> str:
        return f"<{self._entry} of {self._name}>"

    def __reduce__(self) -> str | tuple[Any, ...]:
        """By reference if the attribute there is this decorated function; else by its parts."""
        is_method = isinstance(self._function, MethodType)
        holder, name = self._place()
        found = getattr(holder, name, None)
        by_name = str(vars(self).get("__qualname__"))
        # a method that is itself an attribute of its instance is not there before that is read
        if found is self and not is_method:
            return by_name
        if found is not self and inspect.getattr_static(holder, name, None) is self:
            return inspect.getattr_static, (holder, name)  # what binds to instances, unbound
        if found is not self and isinstance(found, AdaptiveFunction):
            if found._owner is self._owner:
                return getattr, (holder, name)
        elif found is None and isinstance(self._function, FunctionType):
            return by_name  # a local function: it is copied and refused as those are
        return object.__new__, (type(self),), vars(self).copy()

    def _place(self) -> tuple[object, str]:
        """What the function is an attribute of, if it says so, and its name there."""
        function = self._function
        if isinstance(function, MethodType):
            return function.__self__, getattr(function, "__name__", "")
        *path, name = str(vars(self).get("__qualname__", "")).split(".")
        holder: object = sys.modules.get(vars(self).get("__module__", ""))
        for step in path:
            holder = getattr(holder, step, None)
        return holder, name

    def _with(self, function: Callable[..., Any]) -> Self:
        """The same for a bound function."""
        bound = object.__new__(type(self))
        bound.__dict__ |= self.__dict__
        bound.__dict__ |= {"_function": function, "__wrapped__": function, "_class_name": None}
        return bound

    def _begin(self, initial: int | None) -> int | None:
        """The size that a call begins with; None where neither it nor the decorator names one."""
        if initial is None:
            return self._initial
        return checked_initial(f"toma_{self._initial_name}", initial, self._options.limits)

    def _remembered(
        self,
        context: Any,
        cache_type: CacheType | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        split: tuple[Tensor, int] | None = None,
    ) -> RememberedCall | RemembersNothing:
        """What is remembered for a call, asked by the method that is called."""
        options = self._options
        try:  # as calling_frame() does, without a call of its own
            frame = sys._getframe(2)
        except ValueError:
            frame = sys._getframe(1)
        if frame.f_code is _CALL_OF_CLASS and frame.f_back is not None:
            frame = frame.f_back  # who called the method, and not what bound it
        return remembered_of(
            self._owner,
            frame,
            options.context if context is None else context,
            cache_type or options.cache_type,
            args,
            kwargs,
            function=self._function,
            split=split,
        )


class _OfClass:
    """A method that was looked up in its class: it is called with an instance first."""

    def __init__(self, adaptive: AdaptiveFunction, owner: type) -> None:
        wrapper: Any = self
        functools.update_wrapper(wrapper, adaptive._function, updated=())
        self._adaptive = adaptive
        self._class = owner

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self._adaptive._bound(instance, owner)  # the name of another class for the method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], self._class):
            return self._adaptive._bound(args[0], self._class)(*args[1:], **kwargs)
        plain: Any = self._adaptive  # a function that has the class as its namespace
        return plain(*args, **kwargs)

    def __repr__(self) -> str:
        return repr(self._adaptive)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._class, self._name_in_class())

    def _name_in_class(self) -> str:
        """The attribute that it is: not always the name that the function was written under."""
        for kind in self._class.__mro__:
            for name, value in vars(kind).items():
                if isinstance(value, AdaptiveFunction) and value._owner is self._adaptive._owner:
                    return name
        return str(vars(self)["__name__"])


_CALL_OF_CLASS = _OfClass.__call__.__code__


def _class_of_method(function: Any) -> str | None:
    """The class in whose body a function with a ``self`` was written; None for other functions."""
    code = getattr(function, "__code__", None)
    if code is None or code.co_varnames[: min(code.co_argcount, 1)] not in (("self",), ("cls",)):
        return None
    name = function.__qualname__.rpartition(".")[0]
    return None if name.endswith("<locals>") else name or None


def required(initial: int | None, name: str, arguments: str) -> int:
    """A size to begin with.

    Raises:
        AdaptiveUsageError: there is none.
    """
    if initial is None:
        raise AdaptiveUsageError(f"{name}() has no batch size to begin with. Give {arguments}.")
    return initial


def _attributes_of(function: object, wrapper: type) -> dict[str, Any]:
    """The attributes of a function, but for those that would hide what its wrapper has."""
    own = set(dir(wrapper))
    attributes: dict[str, Any] = getattr(function, "__dict__", {})
    return {name: value for name, value in attributes.items() if name not in own}


def _plain(function: Any) -> Any:
    """The function inside a classmethod or a staticmethod."""
    return function.__func__ if isinstance(function, classmethod | staticmethod) else function
