"""When a step is verified: at calls 1, 2, 3, 5, 10, 20 and so on of a program with a kind of batch.

A program is code, what it holds, the declaration and the modes of modules. The first changes of a
number or text in it begin anew, later ones are verified once. A program that was refused is
verified in each call.

Invariant: nothing here holds a function, a model or a tensor; a kind of batch that was not verified
yet is verified, however many there were, and a call that failed or was refused counts for nothing;
and over a long run at most 2 samples in 100 are run for verification, those of the calls above, of
a program's first changes and of refused programs aside.
"""

from __future__ import annotations

import functools
import gc
import math
import os
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence, Sized
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain, count, islice
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from tenure._heap import instance_attributes
from tenure._torch.quiet import without_functions
from tenure._torch.writes import version_of
from tenure.scopes import is_disposed

from ..._reachable import is_of_a_library
from ..._sizes import stands_for
from ..._undo import OF_EVERY_MODULE, home_of, is_library, modules_below
from .._parts import StepParts
from .._samples import Leaf

_FIRST = 3
# What a long training pays, whatever its numbers do.
_SHARE = 0.02
_MOST_PLACES = 1024
_MOST_FREE = 64
"""A program, and the first calls of all programs of a piece of code, are verified so often without
a count of samples, beside new kinds of batches."""
_MAX_ITEMS = 32
"""So much is looked at of a container or an object."""
_MOST_VALUES = 512
"""So much is looked at that stands in what the function, the modules and the batch hold."""
_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device)
_SEVERAL: Any = (list, tuple, set, frozenset, deque)
_LOSSES = nn.MSELoss.__module__
_WRAPPING = (types.MappingProxyType, types.CellType, types.MethodType)
_HOLDING = ("argparse", "collections", "types")
"""The modules of Python with classes whose objects are settings or containers."""
_MOST_SUMMED = 1 << 20
_FAR_ABOVE = 1.5
"""Times the largest label so far: 255, of 150 classes."""


@dataclass(slots=True)
class _BatchKind:
    """The counts of a kind of batch in a program, split and verified, and its next call to verify.

    Attributes:
        lowest: the lowest count of each term that was looked at.
        n_ties: how often a count was as low.
    """

    n_calls: int = 0
    n_verified: int = 0
    due: int = 1
    lowest: dict[str | None, float] = field(default_factory=dict)
    n_ties: int = 0

    def note_verified(self, n_first: int) -> None:
        """Set the next call, after so many first ones 5, 10, 20 and so on."""
        self.n_verified += 1
        self.due = self.n_calls + 1
        if self.n_verified >= n_first:
            self.due = next(n for i in count() if (n := 5 << i) > self.n_calls)


@dataclass(slots=True)
class _StepProgram:
    """What is known of a program.

    Attributes:
        refusal: what its error was made of, which holds no frame.
        extremes: of each part of a batch the largest label, or the sign of the least measurement,
            negated.
        places: by kind of batch.
        n_first: how many first calls of each are verified.
    """

    n_calls: int = 0
    n_first: int = _FIRST
    n_free: int = 0
    refusal: tuple[Any, ...] | None = None
    extremes: dict[str, float] = field(default_factory=dict)
    places: OrderedDict[Hashable, _BatchKind] = field(default_factory=OrderedDict)
    # of the last call, by path
    _values: dict[Hashable, Any] = field(default_factory=dict)
    # how many values were verified of what has changed since; the first one counts
    _n_verified_at: dict[Hashable, int] = field(default_factory=dict)
    _unverified: set[Hashable] = field(default_factory=set)

    def has_changed(self, values: dict[Hashable, Any]) -> bool:
        """Return whether a value has changed; begin anew if few of its values were verified."""
        before, self._values = self._values, values
        for path, value in values.items():
            known = before.get(path, value)
            # nan counts as equal to nan
            if known is not value and known != value and (known == known or value == value):
                self._n_verified_at.setdefault(path, 1)
                self._unverified.add(path)
        # a value that came or went has changed what holds it
        for path in self._n_verified_at.keys() - values.keys():
            del self._n_verified_at[path]
            self._unverified.discard(path)
        changed = [self._n_verified_at[path] for path in self._unverified]
        is_early = self.n_calls >= _FIRST and min(changed, default=_FIRST) < _FIRST
        if is_early and self.n_free < _MOST_FREE:
            # batches that were enough for what it was may be too much alike for what it is
            self.places.clear()
            self.extremes.clear()
            # each number that changes now and then would cost as many as a new program
            self.n_first = 1
        return bool(changed)

    def note_verified(self) -> None:
        """Note that all values were."""
        for path in self._unverified:
            self._n_verified_at[path] += 1
        self._unverified.clear()


@dataclass(slots=True)
class _CodeCounts:
    """The counts of a piece of code."""

    n_samples: int = 0
    n_extra: int = 0
    n_free: int = 0
    programs: OrderedDict[Hashable, _StepProgram] = field(default_factory=OrderedDict)


# of the process, so that a closure that is new in each call counts on
_codes: OrderedDict[Hashable, _CodeCounts] = OrderedDict()
_lock = threading.Lock()


class SplitCall:
    """One split call.

    Args:
        parts: the step.

    Attributes:
        program: what is known of it.
        is_due: whether it is to be verified.
        is_first: whether it is one of the first, that may cost what they do.
    """

    def __init__(self, parts: StepParts) -> None:
        # the counts below may be off by one between threads, which costs a verification
        with _lock:
            self._code = code = _at(_codes, _identity_of(stands_for(parts.spec.fn)), _CodeCounts)
        with without_functions():
            key, values = _program(parts)
            with _lock:
                self.program = program = _at(code.programs, key, _StepProgram)
            has_changed = program.has_changed(values)
            kind = _contents(parts.leaves, program.extremes)
        with _lock:
            self._place: _BatchKind = _at(program.places, kind, _BatchKind)
        place = self._place
        program.n_calls += 1
        place.n_calls += 1
        code.n_samples += parts.n_samples
        # one that comes back often has an allowance of its own, such as a fold of a
        # cross-validation
        n_free = program.n_free if program.n_calls > _FIRST else code.n_free
        # another model or loss may be wrong where many were right before it, and what was refused
        # stays so until the program is another one
        is_open = not place.n_verified or program.refusal is not None
        # calls on schedule cost little in any share: after each, as many follow without
        is_scheduled = place.n_calls >= place.due
        self.is_first = is_open or (is_scheduled and n_free < _MOST_FREE)
        is_wanted = is_scheduled or has_changed or is_open
        self.is_due = is_wanted and (self.is_first or self.allows(2 * parts.n_samples))

    def allows(self, n_samples: int) -> bool:
        """Return whether so many more samples are no more than the share of all."""
        within_share = self._code.n_extra + n_samples <= _SHARE * self._code.n_samples
        return self.is_first or within_share

    def note_verified(self, n_samples: int) -> None:
        """Note that it was, with so many samples."""
        if self.is_first:
            self._code.n_free += 1
            self.program.n_free += 1
        else:
            self._code.n_extra += n_samples
        self.program.note_verified()
        self._place.note_verified(self.program.n_first)

    def wants_count(self, name: str | None, count: float, n_samples: int) -> bool:
        """Return whether to look at a count: nothing as low was seen, or nothing lower."""
        place = self._place
        known = place.lowest.get(name, math.inf)
        if not 0 < count <= known:
            place.lowest[name] = min(known, count)
            return False
        if count == known:
            place.n_ties += 1
            return place.n_ties <= _FIRST or self.allows(n_samples)
        return True

    def note_count(self, name: str | None, known: float, n_samples: int) -> None:
        """Note the lowest count that is known to be none that was clamped."""
        self._place.lowest[name] = known
        self._code.n_extra += n_samples


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


def _program(parts: StepParts) -> tuple[Hashable, dict[Hashable, Any]]:
    """Return what tells a program from others, and the values in it, which may change."""
    spec, held = parts.spec, parts.found.held
    modules = modules_below(parts.roots.values())
    # the numbers of torch's own say how it is built, those of its losses what they compute
    homes = {type(module).__module__ for module in modules} - {_LOSSES}
    libraries = {home for home in homes if is_of_a_library(home)}
    own = [module for module in modules if type(module).__module__ in libraries]
    # a text may select another loss, and differs in each call where it names a sample
    shared = [leaf.value for leaf in parts.leaves if leaf.dim is None]
    values = _values([*held, *modules, *shared, spec.weight], own)
    values["altered"] = _altered(modules)
    for i, module in enumerate(own):
        values |= {(i, name): number for name, number in _numbers_of(module)}
    modes = hash(tuple([module.training for module in modules]))
    asked = [type(each) for each in (spec.weight, spec.then, spec.once)]
    loss = None if callable(spec.loss) else spec.loss
    options = spec.batchnorm, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    kinds = tuple([_look_at(each).kind for each in held])
    return (kinds, modes, *asked, loss, options), values


def _altered(modules: Iterable[nn.Module]) -> tuple[Any, ...]:
    """Return which modules have hooks, or a forward of their own, and the code of these."""
    found: list[Any] = []
    for i, module in enumerate(modules):
        own = vars(module).get("forward")
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        found += [(i, _look_at(each).now) for each in (own, *hooks) if each is not None]
    return tuple(found)


def _numbers_of(module: nn.Module) -> list[tuple[Hashable, Any]]:
    """Return the numbers in buffers and parameters by name, and which parameters are trained."""
    # such as the weight of a term that is warmed up; BatchNorm counts its batches
    numbers = [
        (name, _number_in(value))
        for name, value in chain(module._buffers.items(), module._parameters.items())
        if value is not None and name != "num_batches_tracked" and _is_number(value)
    ]
    trained = [each.requires_grad for each in module._parameters.values() if each is not None]
    return [*numbers, ("", hash(tuple(trained)))]


# --- what a function holds


class _Seen(NamedTuple):
    """What an object shows without running code of the user's.

    Attributes:
        kind: differs if another loss is computed with it, whatever numbers it holds.
        now: differs also if what it is has changed.
        parts: what it holds, by name.
    """

    kind: Hashable
    now: Hashable
    parts: Iterable[tuple[Hashable, Any]] = ()


def _values(roots: Sequence[Any], known: Iterable[Any]) -> dict[Hashable, Any]:
    """Return the numbers, the texts and the kinds of objects at and below some, by path.

    The nearest come first, because a history or a data set may stand below any of them.

    Args:
        roots: the objects.
        known: what is not looked into.
    """
    found: dict[Hashable, Any] = {}
    # it keeps what it had, so that an id is that of no other, and gets more
    waiting: list[tuple[Hashable, Any]] = [*enumerate(roots)]
    n_roots, most = len(waiting), 0
    seen: dict[int, Hashable] = {id(each): -1 - i for i, each in enumerate(known)}
    for i, (path, value) in enumerate(waiting):
        if i == n_roots:
            most = len(found) + _MOST_VALUES
        if i >= n_roots and len(found) >= most:
            break
        if type(value) in _PLAIN:
            found[path] = value
        elif id(value) in seen:
            # which of several it is tells as much as what it holds
            found[path] = seen[id(value)]
        else:
            seen[id(value)] = path
            _, found[path], parts = _look_at(value)
            for key, each in islice(parts, _MAX_ITEMS):
                below = hash((path, key))
                if type(each) in _PLAIN:
                    found[below] = each
                else:
                    waiting.append((below, each))
    return found


def _look_at(value: Any) -> _Seen:
    # isinstance() asks a weak proxy, and one of nothing raises
    kind = type(value)
    name = kind.__qualname__
    if kind in _PLAIN:
        return _Seen(name if kind in _PLAIN[:3] else value, value)
    if issubclass(kind, Tensor):
        return _of_tensor(value)
    if issubclass(kind, nn.Module):
        held = vars(value)
        set_to = [item for item in held.items() if type(item[1]) in (bool, str)]
        without = [key for key, buffer in value._buffers.items() if buffer is None]
        own = ((k, v) for k, v in held.items() if k not in OF_EVERY_MODULE)
        parts = chain(own, _numbers_of(value), value._modules.items())
        # by identity: another model of the same class may have another criterion
        me = _identity_of(value)
        return _Seen((me, *set_to, *without), me, parts)
    if issubclass(kind, dict):
        return _by_key(None, name, value)
    if kind is ContextVar:
        return _Seen(_identity_of(value), "", [("", value.get(None))])
    if value is os.environ:
        return _Seen(name, hash(frozenset(value.items())))
    for base in _SEVERAL:
        if issubclass(kind, base):
            items = [*islice(base.__iter__(value), _MAX_ITEMS)]
            # the numbers are one value, so that each that a history gets is none of its own
            plain = [each for each in items if type(each) in _PLAIN]
            others = ((i, each) for i, each in enumerate(items) if type(each) not in _PLAIN)
            return _Seen(name, (name, len(items), *plain), others)
    if kind is types.FunctionType:
        # by its code, so that a new closure of the same code counts on
        code = _identity_of(value.__code__)
        defaults = value.__defaults__ or (), value.__kwdefaults__ or {}
        return _Seen(code, code, enumerate((*(value.__closure__ or ()), *defaults)))
    if kind in _WRAPPING or issubclass(kind, functools.partial):
        # what they show, hold, or call
        return _Seen(name, "", enumerate(gc.get_referents(value)))
    if issubclass(kind, type | types.ModuleType):
        return _Seen(value.__name__, value.__name__)
    me = _identity_of(value)
    if issubclass(kind, Enum):
        return _Seen(me, (name, value._name_))
    # an image of Pillow has the first alone
    if hasattr(kind, "__array_interface__") and hasattr(kind, "dtype"):
        number = [("", value.item())] if value.size == 1 else ()
        return _Seen(me, (value.dtype.str, value.ndim), number)
    for plain_base in _PLAIN[:5]:
        if issubclass(kind, plain_base):
            text = name, plain_base.__repr__(value)
            return _Seen(name if plain_base in _PLAIN[:3] else text, text)
    if is_library(home_of(kind)) and home_of(kind) not in _HOLDING:
        return _Seen(me, name)
    slots = [
        each
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for each in vars(base).items()
        if type(each[1]) is types.MemberDescriptorType
    ]
    held = instance_attributes(value).copy()
    for key, slot in slots:
        # one without a value yet raises
        with suppress(AttributeError):
            held[key] = slot.__get__(value)
    return _by_key(me, name, held)


def _by_key(kind: Hashable, name: str, items: dict[Any, Any]) -> _Seen:
    # a key that is an object of the user's may be another in each call
    first = islice(enumerate(dict.items(items)), _MAX_ITEMS)
    parts = [(key if type(key) in _PLAIN else i, each) for i, (key, each) in first]
    keys = hash(tuple([key for key, _ in parts]))
    texts = tuple([each for each in parts if type(each[1]) is str])
    return _Seen(texts if kind is None else kind, (name, dict.__len__(items), keys), parts)


def _of_tensor(value: Tensor) -> _Seen:
    if is_disposed(value):
        return _Seen(("Tensor",), "")
    kind, number = (value.dtype, value.dim()), list[tuple[str, Any]]()
    if _is_number(value):
        number = [("", _number_in(value))]
    return _Seen(("Tensor", kind), (*kind, value.requires_grad), number)


def _is_number(value: Tensor) -> bool:
    is_plain = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided
    return is_plain and not value.requires_grad and not value.is_meta and value.numel() == 1


def _number_in(value: Tensor) -> Any:
    # read if no device has to be waited for
    return value.item() if value.device.type == "cpu" else version_of(value)


class _ById(weakref.ref[Any]):
    """A weak reference that is equal to another one of the same object, while that is alive."""

    # that of torch asks the object for an attribute, which a class of the user's may answer
    __slots__ = ("_id",)
    _id: int

    def __new__(cls, value: Any) -> Self:
        reference = super().__new__(cls, value)
        reference._id = id(value)
        return reference

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, _ById):
            return self is other
        return self() is other() and self() is not None


def _identity_of(value: Any) -> Hashable:
    """Return an object by identity, or by its type where it allows no weak reference."""
    if type(value) is types.CodeType or type(value).__weakrefoffset__:
        return _ById(value)
    return type(value).__qualname__


# --- the kind of a batch


def _contents(leaves: Sequence[Leaf], extremes: dict[str, float]) -> Hashable:
    """Describe each leaf: its kind, whether labels are ignored, whether samples are alike.

    And which leaves leave out as many places: a mask counts like labels until prompts are ignored.

    Args:
        leaves: of the batch.
        extremes: the largest label of each so far, or the sign of the least measurement, negated.
            A label far above may be one that is ignored, such as 255; the first zero may be a hole.
    """
    kinds: dict[str, Hashable] = {}
    traits: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for leaf in leaves:
        value = leaf.value
        kind: Hashable = getattr(value, "dtype", type(value).__name__)
        if isinstance(value, Tensor):
            kind = value.dtype, value.dim(), value.requires_grad
        elif leaf.dim == "items":
            kind = len(set(map(_extent, value))) <= 1
        kinds[leaf.path] = kind
        # of uint16, quantized numbers and 8 bits of floating point torch tells no least one
        with suppress(RuntimeError, TypeError, ValueError):
            if (found := _traits(leaf)) is not None:
                traits.setdefault(found.device, []).append((leaf.path, found))
    told = dict[str, Hashable]()
    first_with = dict[float, str]()
    # the host waits for each device once, not for each leaf
    for there in traits.values():
        numbers = torch.stack([each for _, each in there]).tolist()
        for (path, _), (sign, *alike, n_left_out, high) in zip(there, numbers, strict=True):
            like = first_with.setdefault(n_left_out, path) if n_left_out else path
            # over all calls: in each small batch they may be others
            if high > _FAR_ABOVE * extremes.get(path, -math.inf):
                extremes[path] = high
            told[path] = (sign, *alike, like, extremes[path])
    return tuple([(path, kind, told.get(path)) for path, kind in kinds.items()])


def _extent(item: Any) -> Hashable:
    """Return how much an item of a list holds, such as the boxes of an image."""
    if isinstance(item, Mapping):
        return tuple(map(_extent, item.values()))
    if hasattr(item, "shape"):
        return tuple(item.shape)
    return len(item) if isinstance(item, Sized) else str(item)


def _traits(leaf: Leaf) -> Tensor | None:
    """Return what tells that samples may count otherwise than before.

    That is the sign of the least label, or of measurements whether one is nan; whether all are the
    same; whether samples are even; how many places are left out; and the largest label, or the sign
    of the least measurement, negated. The sign tells -100 among labels, and 0 in a mask. A leaf is
    even where each sample has as much of a mask, or as many ignored labels. Left out are these, and
    the zeros of a mask.
    """
    value, dim = leaf.value, leaf.dim
    if hasattr(type(value), "__array_interface__"):
        value = torch.tensor(value)
    # a tensor whose class has operations of its own may have none of these
    if type(value).__dict__.get("__torch_dispatch__") is not None and type(value) is not Tensor:
        return None
    if not isinstance(value, Tensor) or value.layout is not torch.strided or not value.numel():
        return None
    if value.is_nested or value.is_meta or value.is_complex():
        return None
    value = value.detach()
    is_measured = value.is_floating_point()
    low, high = value.aminmax()
    fewest, most = low, high
    n_left_out = torch.zeros_like(low)
    # torch sums small integers in 8 bytes each
    if isinstance(dim, int) and (value.element_size() > 2 or value.numel() <= _MOST_SUMMED):
        amounts = value if is_measured else value == low
        others = [i for i in range(value.dim()) if i != dim % value.dim()]
        amounts = amounts.sum(others) if others else amounts
        fewest, most = amounts.aminmax()
        n_left_out = n_left_out if is_measured else amounts.sum() * (low <= 0)
    sign = low.float().sign()
    if is_measured:
        high, sign = -sign.nan_to_num(1), low.isnan()
    return torch.stack([sign, low == high, fewest == most, n_left_out, high])
