"""The modules of a step: those that a function can reach, and those seen when they run.

A function reaches what it captures, is bound to, or names in its code. Invariant: only what the
code names counts, so that a model which happens to stand beside the one that is trained isn't taken
for a part of the step. What is overlooked so is seen when it runs; but generators, tensors with a
graph, and modules inside compiled code are not.

Invariant: a module is known before its first line runs, so that what it changes can be noted
first; and each that runs in a split step is judged, however the function got hold of it.
"""

from __future__ import annotations

import dis
import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

from tenure._errors import AdaptiveUsageError
from tenure._torch.compiler import never_compiled
from tenure._torch.modules import BatchNorm, InstanceNorm, modules_told

from ._callables import short_name_of, unused
from ._undo import (
    Generator,
    generator_kinds,
    generators_of,
    is_gone,
    modules_below,
    named_modules,
)

Listener = Callable[[list[nn.Module]], object]
T = TypeVar("T")
# Deeper than helpers of helpers call, and shallow enough for an object that holds a whole program.
_MAX_DEPTH = 8
_MAX_ITEMS = 256
# A value that stands deeper changed no loss that was seen so far.
_HELD_DEPTH = 4
_PLAIN = (int, float, complex, str, bytes, bool, type(None))
# Their functions get the user's tensors as arguments and hold none.
_LIBRARIES = ("torch", "numpy", "builtins")
# What a call of an object uses, and what `functools.cache` calls.
_IMPLIED = frozenset({"__call__", "__wrapped__"})


class StepModels:
    """The modules that are known so far.

    Args:
        roots: the modules that the function runs, by name.
        others: further modules that are used, such as those of the loss.
        is_given: whether the user named the roots.

    Attributes:
        roots: those by name, each with what is below it.
        found: those of them that were known before anything ran.
        all: every module that is known, once.
        new: those that ran and are below no root, by name, until somebody judges and removes them.
        listeners: get modules that nobody knew, before they run in a block of `seeing`.
    """

    def __init__(
        self, roots: dict[str, nn.Module], others: Collection[nn.Module], *, is_given: bool
    ) -> None:
        self.roots = roots
        self.found = roots.copy()
        self.all = modules_below(roots.values())
        # What stands below a root was looked at before the split; other modules are when they run.
        # All of them are kept in `all`, so that an id is that of no other.
        self._judged = set(map(id, self.all))
        self._is_given = is_given
        # what the loss uses is noted too, so that it can be taken back
        if not self._judged.issuperset(map(id, others)):
            self.all = modules_below([*self.all, *others])
        self._known = set(map(id, self.all))
        self.new: dict[str, nn.Module] = {}
        self.listeners: list[Listener] = []

    def seeing(self) -> AbstractContextManager[None]:
        """Open a block in which modules are seen when they run."""
        # most calls of modules are of one that was judged, and cost a look here
        return modules_told(self._see, known=self._judged)

    @contextmanager
    def telling(self, *listeners: Listener) -> Iterator[None]:
        """Open a block in such a block that has more listeners."""
        before, self.listeners = self.listeners, [*self.listeners, *listeners]
        try:
            yield
        finally:
            self.listeners = before

    # it runs between the frames of compiled code
    @never_compiled
    def _see(self, module: nn.Module, values: object) -> None:
        below = modules_below([module])
        self._judged.update(map(id, below))
        name = unused(type(module).__name__, self.roots.keys() | self.new.keys())
        self.new[name] = module
        # a model that the user named is what names in reports start from, and nothing is added to
        # it
        if not self._is_given:
            self.roots[name] = module
        # told before its first line runs, or its buffers would be noted too late
        new = [each for each in below if id(each) not in self._known]
        self._known.update(map(id, new))
        self.all += new
        for listener in self.listeners:
            listener(new)


class CodeNames(NamedTuple):
    """The names in a piece of code, the code written inside it included.

    Attributes:
        globals: the globals and builtins that it reads.
        attributes: the attributes and methods that it reads, of whatever object.
    """

    globals: frozenset[str]
    attributes: frozenset[str]


@functools.lru_cache(maxsize=512)
def names_in(code: CodeType) -> CodeNames:
    """Read the instructions; code holds no tensors, so remembering it keeps none alive."""
    # `co_names` does not do: by it, `b.model` would name the global that is called `model`, too
    names: dict[bool, set[str]] = {True: set(), False: set()}
    for each in dis.get_instructions(code):
        if each.opcode in dis.hasname:
            names[each.opname in ("LOAD_GLOBAL", "LOAD_NAME")].add(each.argval)
    inner = [names_in(each) for each in code.co_consts if isinstance(each, CodeType)]
    return CodeNames(
        frozenset(names[True]).union(*(each.globals for each in inner)),
        frozenset(names[False]).union(*(each.attributes for each in inner)),
    )


def _attributes_in(function: FunctionType) -> frozenset[str]:
    """Return the attributes that a function reads; a decorated method is bound by its decorator."""
    names = names_in(function.__code__).attributes
    wrapped = getattr(function, "__wrapped__", None)
    return names | _attributes_in(wrapped) if isinstance(wrapped, FunctionType) else names


def used_by(function: FunctionType) -> list[tuple[str, Any]]:
    """Return the values that a function's code names: captured, global, defaults."""
    used: list[tuple[str, Any]] = []
    if is_of_a_library(function.__module__):
        return used
    code, space = function.__code__, function.__globals__
    for key, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            used.append((key, cell.cell_contents))
        except ValueError:
            # the variable has no value yet
            continue
    names = sorted(names_in(code).globals & space.keys())
    used += zip(names, map(space.__getitem__, names), strict=True)
    defaults = function.__defaults__ or ()
    named = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    used += [*zip(named, defaults, strict=True), *(function.__kwdefaults__ or {}).items()]
    wrapped = getattr(function, "__wrapped__", None)
    return used if wrapped is None else [*used, (short_name_of(wrapped), wrapped)]


def is_of_a_library(module: str | None) -> bool:
    """Return whether a module is of torch, NumPy or Python, whose code is not searched."""
    return str(module or "").partition(".")[0] in _LIBRARIES


class Reachable:
    """The modules, tensors and generators that some functions use.

    Attributes:
        modules: the modules found, by the name under which the code has them.
        tensors: the tensors found that require grad, by name.
        constants: the other ones.
        generators: the generators of random numbers found.
        unordered: the sets, by name, that have led to several modules or tensors, in an order that
            other processes don't share.
        held: the values that the functions hold themselves, plain ones too, in an order that is the
            same in each call; of a container, what can be called.

    What has the name of something else gets a number: two objects may each have a ``self.net``.
    """

    def __init__(self, *functions: Callable[..., Any] | None) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.tensors: dict[str, Tensor] = {}
        self.constants: dict[str, Tensor] = {}
        self.generators: list[Generator] = []
        self.unordered: list[str] = []
        self.held: list[Any] = []
        # asked once: the answer is other only after NumPy was imported
        self._generator_kinds = generator_kinds()
        self._noted: set[int] = set()
        # keeps what its ids belong to
        self._seen: dict[tuple[int, frozenset[str], bool], Any] = {}
        for function in functions:
            if function is not None:
                self.look_into(function)

    def look_into(self, function: Callable[..., Any]) -> None:
        """Add what one more function uses."""
        self._visit(short_name_of(function), function, frozenset(), 0)

    def visited(self) -> list[Any]:
        """Return all objects that were visited: modules, functions, and what they name."""
        return list(self._seen.values())

    def all_generators(
        self, modules: Iterable[nn.Module], values: Iterable[object] = ()
    ) -> list[Generator]:
        """Return the generators found, those of the functions' modules, and default ones.

        Args:
            modules: more modules that run.
            values: what else may be one.
        """
        return [*self.generators, *generators_of([*self._seen.values(), *modules], values)]

    def captured(self) -> list[Tensor]:
        """Return the leaves that are no parameters of a module."""
        return [tensor for tensor in self.tensors.values() if tensor.is_leaf]

    def computed(self) -> list[str]:
        """Return the names of the tensors that come of a computation of before."""
        return [name for name, tensor in self.tensors.items() if not tensor.is_leaf]

    def _visit(
        self, name: str, value: Any, attributes: frozenset[str], depth: int, *, is_held: bool = True
    ) -> None:
        """Look at a value that code has which names these attributes."""
        if type(value) in weakref.ProxyTypes:
            value = _behind(value)
        function = value.__func__ if isinstance(value, MethodType) else value
        if isinstance(function, FunctionType):
            # of its own code, not of the caller's
            attributes = _attributes_in(function)
        is_held = is_held and depth < _HELD_DEPTH
        key = (id(value), attributes, is_held)
        if is_held and value is not None:
            self.held.append(value)
        if isinstance(value, _PLAIN) or key in self._seen or depth > _MAX_DEPTH:
            return
        self._seen[key] = value
        known: dict[str, Any] | None = None
        if isinstance(value, nn.Module):
            known = self.modules
        elif isinstance(value, Tensor):
            # a closure may hold what the scope of the last step has disposed
            if is_gone(value):
                return
            known = self.tensors if value.requires_grad else self.constants
        elif isinstance(value, self._generator_kinds):
            self.generators.append(value)
            return
        if known is not None:
            if id(value) not in self._noted:
                self._noted.add(id(value))
                known[unused(name, known)] = value
            return
        before = len(self.modules) + len(self.tensors)
        is_container = isinstance(value, Mapping | list | tuple | set | frozenset)
        for below, child in _below(name, value, attributes):
            # another child makes another function; items of a history do not
            is_own = isinstance(child, MethodType) and child.__self__ is value
            is_told = callable(child) if is_container else not is_own
            self._visit(below, child, attributes, depth + 1, is_held=is_held and is_told)
        n_found = len(self.modules) + len(self.tensors) - before
        if n_found > 1 and isinstance(value, set | frozenset):
            self.unordered.append(name)


def _below(name: str, value: Any, attributes: frozenset[str]) -> Iterable[tuple[str, Any]]:
    """Return the parts of a value, one level down."""
    if isinstance(value, FunctionType):
        return used_by(value)
    if isinstance(value, MethodType):
        return [(short_name_of(value.__func__), value.__func__), ("self", value.__self__)]
    if isinstance(value, functools.partial):
        args = [(f"{name} argument {i}", each) for i, each in enumerate(value.args, 1)]
        return [(short_name_of(value.func), value.func), *args, *value.keywords.items()]
    if isinstance(value, weakref.ref):
        return [(name, value())]
    if isinstance(value, Mapping):
        items = list(value.items())[:_MAX_ITEMS]
        return [(f"{name}[{_shown(key)}]", each) for key, each in items]
    if isinstance(value, list | tuple | set | frozenset):
        return [(f"{name}[{i}]", each) for i, each in enumerate(list(value)[:_MAX_ITEMS])]
    return _of_object(name, value, attributes)


def _shown(key: Any) -> str:
    # the state of an optimizer has parameters for keys, and to print those reads all their numbers
    return repr(key) if isinstance(key, str | int | float | None) else f"<{type(key).__name__}>"


def _of_object(name: str, value: Any, attributes: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object, a class or a Python module that the code names."""
    is_class, is_module = isinstance(value, type), isinstance(value, ModuleType)
    # `torch.nn.functional` has every name that a loss uses
    if is_of_a_library(value.__module__ if is_class else value.__name__ if is_module else None):
        return
    space = {} if is_class else getattr(value, "__dict__", {})
    if not is_class and not is_module:
        attributes |= _IMPLIED
    for key in sorted(attributes):
        below = name if key in _IMPLIED else f"{name}.{key}"
        if key in space:
            yield below, space[key]
        elif not is_module:
            yield below, _of_class(value, key)


def _of_class(value: Any, key: str) -> Any:
    """Return a class attribute of a name, without running code of the user."""
    instance, owner = (None, value) if isinstance(value, type) else (value, type(value))
    # `inspect.getattr_static` does the same in ten times the time
    found = next((kind.__dict__[key] for kind in owner.__mro__ if key in kind.__dict__), None)
    # of __slots__
    if isinstance(found, MemberDescriptorType):
        try:
            return None if instance is None else found.__get__(instance)
        except AttributeError:
            # it has no value yet
            return None
    if isinstance(found, classmethod):
        return MethodType(found.__func__, owner)
    if isinstance(found, property):
        found = found.fget
    elif isinstance(found, functools.cached_property):
        found = found.func
    if isinstance(found, FunctionType):
        # such as the methods of an optimizer, which lead to all parameters there are
        if is_of_a_library(found.__module__):
            return None
        return found if instance is None else MethodType(found, instance)
    return found.__func__ if isinstance(found, staticmethod) else found


def _behind(value: Any) -> Any:
    """Return the object itself, or what it is a weak proxy of; None once that is gone."""
    if type(value) not in weakref.ProxyTypes:
        return value
    try:
        return value.__repr__.__self__
    except ReferenceError:
        return None


def modules_given(entry: str, model: nn.Module | Iterable[nn.Module]) -> dict[str, nn.Module]:
    """Return the modules of the argument ``model`` of ``entry``, by name.

    Raises:
        AdaptiveUsageError: it is something else.
    """
    model = _behind(model)
    if isinstance(model, nn.Module):
        return {"model": model}
    each_given = list(model) if isinstance(model, Iterable) else []
    several = {f"model[{i}]": _behind(each) for i, each in enumerate(each_given)}
    if not several or any(not isinstance(each, nn.Module) for each in several.values()):
        raise AdaptiveUsageError(
            f"{entry}() got a {type(model).__name__} as model=. Pass the nn.Module that the "
            "function runs, or a list of them."
        )
    return several


# --- modules that mix samples, by their type and state

_MIXING = (BatchNorm, InstanceNorm)


class Coupled(NamedTuple):
    """A module that mixes samples."""

    name: str
    kind: str
    why: str

    def __str__(self) -> str:
        return f"{self.name} ({self.kind}, {self.why})"


def coupled_modules(roots: Mapping[str, nn.Module]) -> list[Coupled]:
    """Return the modules that couple samples, by their type and state."""
    return [
        Coupled(name, type(module).__name__, why)
        for name, module in named_modules(roots)
        if isinstance(module, _MIXING) and (why := _why_coupled(module)) is not None
    ]


def _why_coupled(module: nn.Module) -> str | None:
    if isinstance(module, BatchNorm):
        if module.training:
            return "training with the statistics of its batch"
        # frozen, it normalizes with constants
        has_none = module.running_mean is None
        return "without running statistics, so it uses those of its batch" if has_none else None
    # each sample is normalized alone, but running statistics are a mean over the batch
    if isinstance(module, InstanceNorm) and module.training and module.track_running_stats:
        return "training its running statistics"
    return None
