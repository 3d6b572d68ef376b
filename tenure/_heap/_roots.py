"""What is alive by itself: running frames' variables, modules, classes, the exception in flight."""

import functools
import signal
import sys
import types
from collections.abc import Iterator

from ._frames import RunningFrames, Variable
from ._slots import root_of_context
from ._static import class_attributes, is_kind, type_name
from ._words import Root, attribute

# an exception that a variable holds as well is better named by the variable
_IN_FLIGHT = Root("", "traceback", cost=2)


class Roots:
    """The roots of the moment.

    Args:
        frames: the frames whose local variables count.
    """

    def __init__(self, frames: RunningFrames) -> None:
        self._frames = frames
        self._modules = {id(space): name for name, space in _module_namespaces()}
        self._in_flight = id(sys.exc_info()[1])

    def of(self, candidate: object) -> list[Root]:
        """Every way in which this object is a root; most objects are none."""
        found = [_of_variable(v) for v in self._frames.variables.get(id(candidate), ())]
        if id(candidate) == self._in_flight and candidate is not None:
            found.append(_IN_FLIGHT)
        is_callable = is_kind(type(candidate), types.FunctionType, types.MethodType)
        if is_callable and id(candidate) in self._handlers:
            found.append(Root(f"the handler of {self._handlers[id(candidate)]}", "global"))
        if (in_context := root_of_context(candidate)) is not None:
            found.append(in_context)
        name = self._modules.get(id(candidate)) or _name_of_namespace(candidate)
        if name:
            found.append(Root(name, "global", namer=attribute))
        elif is_kind(type(candidate), type):
            found.append(Root(type_name(candidate), "attribute"))  # type: ignore[arg-type]
        return found

    @functools.cached_property
    def _handlers(self) -> dict[int, str]:
        return {id(handler): name for name, handler in _signal_handlers()}


def _of_variable(variable: Variable) -> Root:
    if variable.thread is not None:
        return Root(f"thread {variable.thread}: {variable.text}", "thread")
    return Root(
        variable.text,
        "frame-local",
        running=True,
        silent=variable.silent,
        captured=variable.is_cell,
    )


def _module_namespaces() -> Iterator[tuple[str, object]]:
    read = class_attributes(types.ModuleType)["__dict__"]
    # reversed, so that of two names of one module the one imported first is kept
    for name, module in reversed(list(sys.modules.items())):
        if is_kind(type(module), types.ModuleType):
            yield name, read.__get__(module)  # type: ignore[attr-defined]


def _signal_handlers() -> Iterator[tuple[str, object]]:
    """Functions that signals call, by the name of the signal; only C code holds them."""
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if callable(handler):
            yield getattr(number, "name", str(number)), handler


def _name_of_namespace(candidate: object) -> str:
    """The name of globals that belong to no module in `sys.modules`, as `exec` makes them."""
    if type(candidate) is dict and "__builtins__" in candidate:
        name = candidate.get("__name__")
        return name if type(name) is str else "<globals>"
    return ""
