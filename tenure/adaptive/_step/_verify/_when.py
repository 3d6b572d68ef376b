"""When a step is verified: at calls 1, 2, 3 and 40 of a place, and then ever more rarely.

A place is code, what the closure holds, what was declared, and the modes of modules. Within it new
shapes of the batch, and labels or masks of a kind not seen before, are verified too.

Invariant: nothing here holds a function, a model or a tensor; the first call of a place is always
verified, however many there were; and over a long run at most 2 samples in 100 are run for
verification, those of the first calls of a place aside.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from tenure.scopes import is_disposed

from ..._reachable import named_modules, names_in, used_by
from ..._sizes import stands_for
from .._samples import Leaf
from .._split import StepParts

_FIRST = 3
# What a long training pays, whatever its shapes do.
_SHARE = 0.02
_MOST_PLACES = 1024
_MOST_FREE = 64
"""How often a piece of code is verified without a count of samples, beside new places: each call
may have labels of another kind."""
_MANY_NEW = 512
"""New places of a piece of code after which it is told, if most of its calls were at one."""
_MAX_DEPTH = 4
_MAX_ITEMS = 32
# not all that are no floats: torch looks for the least of no uint16, and of no quantized number
_COUNTED = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


@dataclass(slots=True)
class _Calls:
    """How often something was split, and the next call to verify."""

    n_calls: int = 0
    due: int = 1

    def begin(self) -> bool:
        """Count a call; whether it is one to verify."""
        self.n_calls += 1
        return self.n_calls >= self.due

    def note_verified(self) -> None:
        """Set the next call: after the first ones 40, 400 and so on."""
        self.due = self.n_calls + 1
        if self.n_calls >= _FIRST:
            self.due = 40
            while self.due <= self.n_calls:
                self.due *= 10


@dataclass(slots=True)
class _Code:
    """What is counted for a piece of code."""

    n_calls: int = 0
    n_new: int = 0
    n_samples: int = 0
    n_extra: int = 0
    n_free: int = 0
    places: OrderedDict[Hashable, _Calls] = field(default_factory=OrderedDict)


# of the process, so that a closure that is new in each call counts on: see
# test_a_closure_that_is_new_in_each_call_is_one_place
_codes: OrderedDict[Hashable, _Code] = OrderedDict()
_lock = threading.Lock()


class Visit:
    """One split call.

    Args:
        parts: the step.

    Attributes:
        is_due: whether it is to be verified.
        is_first: whether it is one of the first, that may cost what they do.
        is_ever_new: whether the place is another one in most calls; said once of a piece of code.
    """

    def __init__(self, parts: StepParts) -> None:
        place, contents, shapes = _place(parts), _contents(parts.leaves), _shapes(parts.leaves)
        # the counts below may be off by one between threads, which costs a verification
        with _lock:
            self._code = _at(_codes, _identity(stands_for(parts.spec.fn)), _Code)
            self._code.n_samples += parts.n_samples
            self._code.n_calls += 1
            self._place = _at(self._code.places, place, _Calls)
            self._content = _at(self._code.places, (place, contents), _Calls)
            self._shape = _at(self._code.places, (place, contents, shapes), _Calls)
        is_due = [each.begin() for each in (self._place, self._content, self._shape)]
        is_new = self._place.n_calls == 1
        is_early = self._place.n_calls <= _FIRST or self._content.n_calls == 1
        # another model or loss may be wrong where many were right before it
        self.is_first = is_new or (is_early and self._code.n_free < _MOST_FREE)
        self._code.n_new += is_new
        seldom_known = self._code.n_calls < 2 * self._code.n_new
        self.is_ever_new = is_new and seldom_known and self._code.n_new == _MANY_NEW
        self.is_due = any(is_due) and (self.is_first or self.allows(2 * parts.n_samples))

    def allows(self, n_samples: int) -> bool:
        """Whether so many more samples are no more than the share of all."""
        # at these calls it costs little in any share, for so many were not verified
        if self.is_first or self._place.n_calls in (40, 400, 4000):
            return True
        return bool(self._code.n_extra + n_samples <= _SHARE * self._code.n_samples)

    def note_verified(self, n_samples: int) -> None:
        """Note that it was, with so many samples."""
        if self.is_first:
            self._code.n_free += 1
        else:
            self._code.n_extra += n_samples
        for each in (self._place, self._content, self._shape):
            each.note_verified()


def _at(known: OrderedDict[Hashable, Any], key: Hashable, make: type) -> Any:
    found = known.get(key)
    if found is None:
        found = known[key] = make()
        if len(known) > _MOST_PLACES:
            # the one that was not used for longest; a program that makes code all the time stays
            # bounded
            known.popitem(last=False)
    else:
        known.move_to_end(key)
    return found


def _place(parts: StepParts) -> Hashable:
    spec = parts.spec
    functions = (spec.fn, spec.loss, spec.weight, spec.then, spec.once)
    modes = tuple(module.training for _, module in named_modules(parts.roots))
    options = spec.batchnorm, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    return (*(_description(each, frozenset(), 0) for each in functions), hash(modes), options)


def _shapes(leaves: Iterable[Leaf]) -> Hashable:
    """The shape of each leaf, without the number of samples."""
    found = []
    for leaf in leaves:
        shape = getattr(leaf.value, "shape", ())
        dim = leaf.dim % len(shape) if isinstance(leaf.dim, int) else -1
        found.append(tuple(n for i, n in enumerate(shape) if i != dim))
    return tuple(found)


def _contents(leaves: Iterable[Leaf]) -> Hashable:
    """What each leaf is, and whether it has labels that are ignored."""
    found = [(leaf.path, leaf.value) for leaf in leaves]
    counted = [(path, value) for path, value in found if _is_counted(value)]
    signs = dict(zip((path for path, _ in counted), _signs(counted), strict=True))
    return tuple(
        (path, value.dtype, signs.get(path, 0))
        if isinstance(value, Tensor)
        else (path, type(value).__name__)
        for path, value in found
    )


def _is_counted(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.dtype not in _COUNTED or value.is_meta:
        return False
    return value.layout is torch.strided and not value.is_nested and bool(value.numel())


def _signs(named: Sequence[tuple[str, Tensor]]) -> list[int]:
    """Of labels and masks the sign of the least one: -100 among labels, 0 in a mask.

    The host waits for each device once, not for each of them.
    """
    # one number of each on its device, and then one transfer
    signs = [value.detach().amin().to(torch.int64).sign() for _, value in named]
    found: dict[torch.device, list[int]] = {}
    for device in dict.fromkeys(sign.device for sign in signs):
        there = [sign for sign in signs if sign.device == device]
        found[device] = torch.stack(there).tolist()[::-1]
    return [found[sign.device].pop() for sign in signs]


# --- what a closure holds


def _description(value: Any, attributes: frozenset[str], depth: int) -> Hashable:
    """What tells a value from others that would make another loss; holds nothing."""
    if value is None or isinstance(value, bool | str | bytes | torch.dtype):
        return value
    # a step or a rate, which changes all the time
    if isinstance(value, int | float):
        # of NumPy, the comparisons are no numbers
        return type(value).__name__, int(value > 0) - int(value < 0)
    if isinstance(value, Tensor):
        return "Tensor" if is_disposed(value) else ("Tensor", value.dtype, value.dim())
    # by identity: another model of the same class may have another criterion
    if isinstance(value, nn.Module):
        return _identity(value), tuple(_plain_attributes(value))
    # what stands deeper changes no loss that was seen so far
    if depth >= _MAX_DEPTH:
        return type(value).__name__
    children = _children(value, attributes)
    return _named(value), *(
        (name, _description(child, names, depth + 1)) for name, child, names in children
    )


def _children(value: Any, attributes: frozenset[str]) -> Iterator[tuple[str, Any, frozenset[str]]]:
    if isinstance(value, functools.partial):
        yield "function", value.func, attributes
        yield from ((str(i), child, attributes) for i, child in enumerate(value.args))
        yield from ((name, child, attributes) for name, child in value.keywords.items())
    elif isinstance(value, MethodType):
        yield "function", value.__func__, attributes
        code = getattr(value.__func__, "__code__", None)
        yield "self", value.__self__, names_in(code).attributes if code else attributes
    elif isinstance(value, FunctionType):
        names = names_in(value.__code__).attributes
        yield from ((name, child, names) for name, child in used_by(value))
    elif isinstance(value, list | tuple):
        # a history, which grows, makes no other place
        items = enumerate(value[:_MAX_ITEMS])
        yield from ((str(i), child, attributes) for i, child in items if callable(child))
    elif isinstance(value, dict):
        named = list(value.items())[:_MAX_ITEMS]
        told = ((key, child) for key, child in named if callable(child) or isinstance(child, str))
        yield from ((repr(key), child, attributes) for key, child in told)
    elif not isinstance(value, ModuleType | type):
        held = getattr(value, "__dict__", {})
        yield from ((name, held[name], attributes) for name in sorted(attributes & held.keys()))


def _plain_attributes(module: nn.Module) -> Iterator[tuple[str, Hashable]]:
    """How a criterion is set; a model's own settings cost little."""
    for name, value in vars(module).items():
        # a weak proxy of nothing raises where isinstance() asks it
        cls = type(value)
        if issubclass(cls, bool | str | int | float) and name != "training":
            yield name, _description(value, frozenset(), 0)
        elif issubclass(cls, Tensor) and not is_disposed(value):
            yield name, value.dim()
    for name, buffer in module._buffers.items():
        yield name, buffer is None


def _named(value: Any) -> Hashable:
    """A function by its code, so that a new closure of the same code counts on."""
    if isinstance(value, FunctionType):
        return _identity(value.__code__)
    if isinstance(value, MethodType | functools.partial | list | tuple | dict):
        return type(value).__name__
    if isinstance(value, type | ModuleType):
        return value.__name__
    return _identity(value)


class _Identity:
    """An object by identity, without keeping it; what took its place in memory is another."""

    __slots__ = ("_id", "_reference")

    def __init__(self, value: object) -> None:
        self._id = id(value)
        self._reference = weakref.ref(value)

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Identity)
            and self._id == other._id
            and self._reference() is not None
            and self._reference() is other._reference()
        )


def _identity(value: Any) -> Hashable:
    if isinstance(value, CodeType) or type(value).__weakrefoffset__:
        return _Identity(value)
    return type(value).__qualname__
