"""What is alive by itself: running frames' variables, modules, classes, the exception in flight."""

import contextvars
import inspect
import sys
import threading
import traceback
import types
from collections import Counter, defaultdict
from collections.abc import Iterator
from types import CodeType, FrameType

from tenure._callers import is_tenure
from tenure._registries import ended_frames

from ._lent import LENDS, lent_parameters, values_in_flight
from ._reading import (
    callers_keep_arguments,
    class_attributes,
    is_kind,
    is_of_library,
    is_optimized,
    read_locals,
    type_name,
)
from ._words import FAR, Root, Step, attribute

# an exception that a variable holds as well is better named by the variable
_IN_FLIGHT = Root("", "traceback", running=True, passing=True, cost=2)
# The current context of a thread is held by no object. What runs in a context of its own, such as a
# task, is better named by who has it.
_IN_CONTEXT = Root("a context variable", "context", cost=2)

# past the attributes of a subclass
_TRACEBACK, _CAUSE, _CONTEXT = (
    vars(BaseException)[f"__{name}__"].__get__ for name in ("traceback", "cause", "context")
)


class Roots:
    """What is alive now by itself, and the frames of all threads.

    Of this thread these are the frames from a given one outwards. Frames of tenure at the inner end
    of its stack are silent: they are who is asking.

    Args:
        innermost: where this thread's stack begins; frames that it called are not looked at.
    """

    def __init__(self, innermost: FrameType | None) -> None:
        # of the frames, and of dictionaries that are the variables of one
        self.ids: set[int] = set()
        self._variables: defaultdict[int, list[Root]] = defaultdict(list)
        # how many references an object gets from plain (not captured) local variables
        self.references: Counter[int] = Counter()
        # how many plain variables of the program have an object, with or without a reference
        self.named: Counter[int] = Counter()
        read = class_attributes(types.ModuleType)["__dict__"]
        # reversed, so that of two names of one module the one imported first is kept
        self._modules = {
            id(read.__get__(module)): name  # type: ignore[attr-defined]
            for name, module in reversed(list(sys.modules.items()))
            if is_kind(type(module), types.ModuleType)
        }
        # the exception in flight and its causes, and by identity which of them has an object in the
        # variables of a function that it ended
        self.errors = _errors_in_flight()
        self.of_errors: defaultdict[int, list[tuple[int, Step]]] = defaultdict(list)
        self._callers_keep = callers_keep_arguments()
        self._add_stack(innermost, thread=None)
        for number, error in enumerate(self.errors):
            for frame, _ in traceback.walk_tb(_TRACEBACK(error)):
                if id(frame) not in self.ids:
                    self._add_frame(frame, None, silent=is_tenure(frame), error=number)
        for frame in ended_frames:
            self._add_frame(frame, None, silent=False)
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        others = sys._current_frames()
        # our own frame in a variable of ours would be a cycle, and keep the whole stack alive
        del others[threading.get_ident()]
        for ident, frame in others.items():
            self._add_stack(frame, thread=names.get(ident, str(ident)))

    def of(self, candidate: object) -> list[Root]:
        """Return every way in which this object is a root; most objects are none."""
        found = list(self._variables.get(id(candidate), ()))
        if any(candidate is error for error in self.errors):
            found.append(_IN_FLIGHT)
        if type(candidate) is contextvars.Context:
            found.append(_IN_CONTEXT)
        name = self._modules.get(id(candidate)) or _name_of_namespace(candidate)
        if name:
            found.append(Root(name, "global", namer=attribute))
        elif is_kind(type(candidate), type):
            found.append(Root(type_name(candidate), "attribute"))  # type: ignore[arg-type]
        return found

    def _add_stack(self, frame: FrameType | None, thread: str | None) -> None:
        silent = thread is None
        while frame is not None:
            silent = silent and is_tenure(frame)
            self._add_frame(frame, thread, silent)
            frame = frame.f_back

    def _add_frame(
        self, frame: FrameType, thread: str | None, silent: bool, error: int | None = None
    ) -> None:
        self.ids.add(id(frame))
        code = frame.f_code
        # the call of a function that an error has ended holds no arguments any more
        callers_keep = self._callers_keep and error is None
        if callers_keep and LENDS:
            self.references.update(values_in_flight(frame))
        if not is_optimized(frame):
            # the globals of a module
            if frame.f_locals is frame.f_globals:
                return
            # the body of a class: its dictionary is the variables and not one more holder
            self.ids.add(id(frame.f_locals))
        cells = {*code.co_cellvars, *code.co_freevars}
        without_reference = cells | lent_parameters(frame)
        pairs = read_locals(frame)
        of_library = is_of_library(frame)
        if callers_keep and not LENDS:
            self.references.update(map(id, _arguments_of(code, dict(pairs))))
        for name, value in pairs:
            text = _spell(frame, name, value)
            root = Root(
                text,
                "frame-local",
                running=True,
                # variables of the compiler, such as the iterator of a comprehension, are no names
                silent=silent or not name.isidentifier(),
                cost=FAR * of_library,
                captured=name in cells,
            )
            if thread is not None:
                root = Root(f"thread {thread}: {text}", "thread", cost=root.cost)
            if error is None or silent:
                self._variables[id(value)].append(root)
            else:
                text = f" in {code.co_qualname}(): local {name}"
                anchor = f"traceback of {type_name(type(self.errors[error]))}"
                cost = 2 * FAR if of_library else 1
                step = Step(text, "traceback", anchor=anchor, cost=cost)
                self.of_errors[id(value)].append((error, step))
            self.references[id(value)] += name not in without_reference
            self.named[id(value)] += name not in cells and not silent


def _errors_in_flight() -> list[BaseException]:
    """Return the exception that is handled now, and those that it has as cause or context."""
    found = [error for error in sys.exc_info()[1:2] if error is not None]
    # the list grows while it is read
    for error in found:
        for before in (_CAUSE(error), _CONTEXT(error)):
            if before is not None and all(before is not known for known in found):
                found.append(before)
    return found


def _arguments_of(code: CodeType, variables: dict[str, object]) -> Iterator[object]:
    """Yield the arguments of a call, as far as the frame's variables still have them."""
    named, rest, _ = inspect.getargs(code)
    yield from (variables[name] for name in named if name in variables)
    packed = variables.get(rest) if rest else None
    yield from packed if type(packed) is tuple else ()


def _spell(frame: FrameType, name: str, value: object) -> str:
    if name == "self":
        return type_name(type(value))
    scope = frame.f_code.co_qualname
    return f"{scope}.<locals>.{name}" if is_optimized(frame) else f"{scope}.{name}"


def _name_of_namespace(candidate: object) -> str:
    """Return the name of globals of no module in `sys.modules`, as `exec` makes them."""
    if type(candidate) is dict and "__builtins__" in candidate:
        name = candidate.get("__name__")
        return name if type(name) is str else "<globals>"
    return ""
