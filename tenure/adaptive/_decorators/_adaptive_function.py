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
    Remembered,
    RememberedCall,
    RemembersNothing,
    checked_initial,
    remembered_of,
)
from ._collect import Collect, collector_for
from ._options import Options
from ._run import Piece, run_pieces


class _Owner:
    """What sizes are remembered for: a decorated function, of which it holds nothing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__module__ = getattr(function, "__module__", "")
        self.__qualname__ = getattr(function, "__qualname__", "")

    def __deepcopy__(self, memo: object) -> Self:
        # copies in a process share their sizes
        return self


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
        # by name: a class that is gone is not kept, and a copy in another process knows them too
        self._classes = _classes_of_method(_plain(function))

    def _bound(self, instance: object, owner: type | None) -> Any:
        """The same function, bound as the wrapped one is."""
        function = self._function
        bind = getattr(type(function), "__get__", None)
        if bind is None:
            return self
        bound = bind(function, instance, owner)
        if bound is not function:
            return self._with(bound)
        if owner is not None and not isinstance(function, MethodType):
            # whoever looks it up in a class may call it with an instance first, also where it was
            # written elsewhere, see
            # test_a_method_that_was_taken_from_another_class_binds_to_instances
            self._classes.add((owner.__module__, owner.__qualname__))
        return self

    def _is_method_of(self, first: object) -> bool:
        """Whether the first argument of a call is the ``self``, or ``cls``, of this very method.

        What stands above it in the class, such as ``@torch.no_grad()``, passes it on like that.
        """
        kinds = first.__mro__ if isinstance(first, type) else type(first).__mro__
        return any((kind.__module__, kind.__qualname__) in self._classes for kind in kinds)

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
            # what binds to instances, unbound
            return inspect.getattr_static, (holder, name)
        if found is not self and isinstance(found, AdaptiveFunction):
            if found._owner is self._owner:
                return getattr, (holder, name)
        elif found is None and isinstance(self._function, FunctionType):
            # a local function: it is copied and refused as those are
            return by_name
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
        bound.__dict__ |= {"_function": function, "__wrapped__": function, "_classes": set()}
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
        # as calling_frame() does, without a call of its own
        try:
            frame = sys._getframe(2)
        except ValueError:
            frame = sys._getframe(1)
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


class PiecesFunction(AdaptiveFunction):
    """What `range` and `chunked` share: a first step, and what becomes of the results."""

    _initial_name = "initial_step"

    def __init__(
        self,
        function: Callable[..., Any],
        initial: int | None,
        options: Options,
        *,
        collect: Collect | None,
        progress: bool,
    ) -> None:
        super().__init__(function, initial, options)
        self._make_collector = collector_for(collect)
        self._progress = progress

    def _run(self, piece: Piece, end: int, initial: int | None, remembered: Remembered) -> Any:
        return run_pieces(
            self._name,
            piece,
            end,
            initial=self._begin(initial),
            options=self._options,
            remembered=remembered,
            collect=self._make_collector,
            progress=self._progress,
        )


def _classes_of_method(function: Any) -> set[tuple[str, str]]:
    """The class in whose body a function with a ``self`` was written; none of other functions."""
    code = getattr(function, "__code__", None)
    if code is None or code.co_varnames[: min(code.co_argcount, 1)] not in (("self",), ("cls",)):
        return set()
    name = function.__qualname__.rpartition(".")[0]
    return set() if not name or name.endswith("<locals>") else {(function.__module__, name)}


def _attributes_of(function: object, wrapper: type) -> dict[str, Any]:
    """The attributes of a function, but for those that would hide what its wrapper has."""
    own = set(dir(wrapper))
    attributes: dict[str, Any] = getattr(function, "__dict__", {})
    return {name: value for name, value in attributes.items() if name not in own}


def _plain(function: Any) -> Any:
    """The function inside a classmethod or a staticmethod."""
    return function.__func__ if isinstance(function, classmethod | staticmethod) else function
