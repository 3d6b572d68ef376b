"""When a step is verified: at calls 1, 2, 3 and 40 of a place, and then ever more rarely.

A place is code, the values that it holds, the declaration, the modes of modules, and the kind of
the batch. Within it, numbers that have changed are verified too. A place that was refused once is
verified in each call.

Invariant: nothing here holds a function, a model or a tensor; a place that was not verified yet is
verified, however many there were, and a call that failed or was refused counts for nothing; and
over a long run at most 2 samples in 100 are run for verification, those of the first calls of a
place, of its first changes and of refused places aside.
"""

from __future__ import annotations

import functools
import math
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from itertools import count
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdRef

from tenure.scopes import is_disposed

from ..._reachable import is_of_a_library, named_modules
from ..._sizes import stands_for
from .._parts import StepParts
from .._samples import Leaf
from ._count_check import Lowest

_FIRST = 3
# What a long training pays, whatever its numbers do.
_SHARE = 0.02
_MOST_PLACES = 1024
_MOST_FREE = 64
"""A piece of code is verified so often without a count of samples, beside new places."""
_MAX_ITEMS = 32
# torch looks for the least of no uint16, no quantized number, and none of 8 bits
_COUNTED = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.float16, torch.bfloat16, torch.float32, torch.float64}
)
_MOST_SUMMED = 1 << 20


@dataclass(slots=True)
class _WatchedNumber:
    """A number that the function holds, as it was in the last call."""

    value: Any
    # how many of its values were verified; the first counts as one
    n_verified: int = 1
    is_due: bool = False


@dataclass(slots=True)
class _CallSite:
    """The counts of a place, split and verified, and its next call to verify."""

    n_calls: int = 0
    n_verified: int = 0
    due: int = 1
    numbers: list[_WatchedNumber] = field(default_factory=list)
    # what the error was made of, which holds no frame
    refusal: tuple[Any, ...] | None = None
    lowest: dict[str | None, float] = field(default_factory=dict)
    n_ties: int = 0

    def changed(self, numbers: list[Any]) -> list[_WatchedNumber]:
        """Return the numbers that were not verified since they have changed."""
        if self.n_calls == 1:
            self.numbers = list(map(_WatchedNumber, numbers))
        for known, value in zip(self.numbers, numbers, strict=True):
            # nan counts as equal to nan
            if known.value != value and (known.value == known.value or value == value):
                known.value, known.is_due = value, True
        return [each for each in self.numbers if each.is_due]

    def note_verified(self) -> None:
        """Set the next call, after the first ones 40, 400 and so on."""
        self.n_verified += 1
        self.due = self.n_calls + 1
        if self.n_verified >= _FIRST:
            self.due = next(n for i in count() if (n := 40 * 10**i) > self.n_calls)
        for each in self.numbers:
            each.n_verified += each.is_due
            each.is_due = False


@dataclass(slots=True)
class _CodeCounts:
    """The counts of a piece of code."""

    n_samples: int = 0
    n_extra: int = 0
    n_free: int = 0
    places: OrderedDict[Hashable, _CallSite] = field(default_factory=OrderedDict)


# of the process, so that a closure that is new in each call counts on
_codes: OrderedDict[Hashable, _CodeCounts] = OrderedDict()
_lock = threading.Lock()


class SplitCall:
    """One split call.

    Args:
        parts: the step.

    Attributes:
        place: what is known of it.
        is_due: whether it is to be verified.
        is_first: whether it is one of the first, that may cost what they do.
    """

    def __init__(self, parts: StepParts) -> None:
        key, numbers = _place(parts)
        # the counts below may be off by one between threads, which costs a verification
        with _lock:
            self._code = code = _at(_codes, _identity_of(stands_for(parts.spec.fn)), _CodeCounts)
            self.place: _CallSite = _at(code.places, key, _CallSite)
        place = self.place
        place.n_calls += 1
        code.n_samples += parts.n_samples
        changed = place.changed(numbers)
        is_early = place.n_verified < _FIRST or any(each.n_verified < _FIRST for each in changed)
        # another model or loss may be wrong where many were right before it, and a place that was
        # refused stays so until the function is another one
        is_open = not place.n_verified or place.refusal is not None
        self.is_first = is_open or (is_early and code.n_free < _MOST_FREE)
        is_wanted = place.n_calls >= place.due or bool(changed) or is_open
        self.is_due = is_wanted and (self.is_first or self.allows(2 * parts.n_samples))

    def allows(self, n_samples: int) -> bool:
        """Return whether so many more samples are no more than the share of all."""
        # at these calls it costs little in any share, for so many were not verified
        if self.is_first or self.place.n_calls in (40, 400, 4000):
            return True
        return bool(self._code.n_extra + n_samples <= _SHARE * self._code.n_samples)

    def note_verified(self, n_samples: int) -> None:
        """Note that it was, with so many samples."""
        if self.is_first:
            self._code.n_free += 1
        else:
            self._code.n_extra += n_samples
        self.place.note_verified()

    def wants_count(self, lowest: Lowest) -> bool:
        """Return whether to look at a count: nothing as low was seen, or nothing lower."""
        known = self.place.lowest.get(lowest.name, math.inf)
        if not 0 < lowest.count <= known:
            self.place.lowest[lowest.name] = min(known, lowest.count)
            return False
        if lowest.count == known:
            self.place.n_ties += 1
            if self.place.n_ties > _FIRST and not self.allows(4 * lowest.chunk.length):
                return False
        return True

    def note_count(self, lowest: Lowest, known: float, n_samples: int) -> None:
        """Note the lowest count that is known to be none that was clamped."""
        self.place.lowest[lowest.name] = known
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


def _place(parts: StepParts) -> tuple[Hashable, list[Any]]:
    """Return what tells a place from others, and the numbers in it, which may change."""
    spec = parts.spec
    numbers: list[Any] = []
    held = tuple(_described(each, numbers) for each in parts.found.held)
    modules = [module for _, module in named_modules(parts.roots)]
    for module in modules:
        # the numbers of torch's own say how it is built
        if not is_of_a_library(type(module).__module__):
            numbers += [n for n in vars(module).values() if type(n) in (int, float)]
    # a text may select another loss, and differs in each call where it names a sample
    plain = (leaf.value for leaf in parts.leaves)
    numbers += [value for value in plain if isinstance(value, bool | int | float | str)]
    modes = hash(tuple(module.training for module in modules)), len(numbers)
    asked = [type(each) for each in (spec.weight, spec.then, spec.once)]
    loss = None if callable(spec.loss) else spec.loss
    options = spec.batchnorm, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    return (held, modes, *asked, loss, options, _contents(parts.leaves)), numbers


# --- what a function holds


def _described(value: Any, numbers: list[Any]) -> Hashable:
    """Describe a value so that one with another loss differs, apart from its numbers.

    Args:
        value: anything that a function holds.
        numbers: gets the numbers that stand in it.
    """
    if isinstance(value, bool | str | bytes | torch.dtype):
        return value
    number = _number(value)
    if number is not None:
        numbers.append(number)
    if isinstance(value, Tensor):
        kind = () if is_disposed(value) else (value.dtype, value.dim())
        return "Tensor", number is None, *kind
    # by identity: another model of the same class may have another criterion
    if isinstance(value, nn.Module):
        return _identity_of(value), tuple(_settings(value, numbers))
    if isinstance(value, dict):
        items = list(value.items())[:_MAX_ITEMS]
        return tuple((repr(key), text) for key, text in items if isinstance(text, str))
    # a function by its code, so that a new closure of the same code counts on
    if isinstance(value, FunctionType):
        return _identity_of(value.__code__)
    if isinstance(value, type | ModuleType):
        return value.__name__
    if number is not None or isinstance(value, MethodType | functools.partial):
        return type(value).__name__
    return _identity_of(value)


def _settings(module: nn.Module, numbers: list[Any]) -> Iterator[tuple[str, Hashable]]:
    """Yield how a criterion is set; a model's own settings cost little."""
    for name, value in vars(module).items():
        # a weak proxy of nothing raises where isinstance() asks it
        kind = type(value)
        if issubclass(kind, bool | str | int | float | Tensor) and name != "training":
            yield name, _described(value, numbers)
        elif issubclass(kind, dict | list | tuple) and value:
            numbers.append(_number(value))
            yield name, kind.__name__
    for name, buffer in module._buffers.items():
        yield name, buffer is None


def _number(value: Any) -> Any:
    """Return a number, or the numbers that stand in a container; None for anything else.

    Those of a container are one, so that a history, which grows, makes no other place.
    """
    if isinstance(value, int | float):
        return value
    if isinstance(value, list | tuple):
        return tuple(each for each in value[:_MAX_ITEMS] if isinstance(each, int | float))
    if isinstance(value, dict):
        items = list(value.items())[:_MAX_ITEMS]
        return tuple((repr(key), each) for key, each in items if isinstance(each, int | float))
    # one of NumPy, or a tensor that no device has to be waited for
    is_array = hasattr(type(value), "__array_interface__") and value.size == 1
    is_ready = type(value) is Tensor and not value.requires_grad and value.device.type == "cpu"
    if is_array or (is_ready and not value.dim() and value.layout is torch.strided):
        return value.item()
    return None


def _identity_of(value: Any) -> Hashable:
    """Return an object by identity, or by its type where it allows no weak reference."""
    if isinstance(value, CodeType) or type(value).__weakrefoffset__:
        return WeakIdRef(value)
    return type(value).__qualname__


# --- the kind of a batch


def _contents(leaves: Sequence[Leaf]) -> Hashable:
    """Describe each leaf: its kind, whether labels are ignored, whether samples are alike."""
    counted = {leaf.path: _traits(leaf, value) for leaf in leaves for value in _counted(leaf.value)}
    traits: dict[str, Hashable] = {}
    # the host waits for each device once, not for each leaf
    for device in {each.device for each in counted.values()}:
        there = {path: each for path, each in counted.items() if each.device == device}
        numbers = torch.stack([*there.values()]).tolist()
        traits.update(zip(there, map(tuple, numbers), strict=True))
    return tuple((leaf.path, _kind(leaf), traits.get(leaf.path)) for leaf in leaves)


def _kind(leaf: Leaf) -> Hashable:
    if isinstance(leaf.value, Tensor):
        return leaf.value.dtype, leaf.value.dim()
    if leaf.dim == "items":
        return len(set(map(_extent, leaf.value))) <= 1
    return getattr(leaf.value, "dtype", type(leaf.value).__name__)


def _extent(item: Any) -> Hashable:
    """Return how much an item of a list holds, such as the boxes of an image."""
    if isinstance(item, Mapping):
        return tuple(map(_extent, item.values()))
    if hasattr(item, "shape"):
        return tuple(item.shape)
    return len(item) if isinstance(item, Sized) else str(item)


def _counted(value: Any) -> list[Tensor]:
    """Return the numbers of a leaf; none where torch finds no least one of them."""
    if hasattr(type(value), "__array_interface__") and value.dtype.isnative:
        is_known = getattr(torch, value.dtype.name, None) in _COUNTED
        value = torch.tensor(value) if is_known else None
    if not isinstance(value, Tensor) or value.dtype not in _COUNTED or value.is_meta:
        return []
    # a tensor whose class has operations of its own may have none of these
    if type(value).__dict__.get("__torch_dispatch__") is not None and type(value) is not Tensor:
        return []
    is_plain = value.layout is torch.strided and not value.is_nested
    return [value.detach()] if is_plain and value.numel() else []


def _traits(leaf: Leaf, value: Tensor) -> Tensor:
    """Return the sign of the least label, whether all are the same, and whether samples are even.

    The sign tells -100 among labels, and 0 in a mask. A leaf is even where each sample has as much
    of a mask, or as many ignored labels.
    """
    dim, is_measured = leaf.dim, value.is_floating_point()
    low, high = value.aminmax()
    fewest, most = low, high
    # torch sums small integers in 8 bytes each
    if isinstance(dim, int) and (value.element_size() > 2 or value.numel() <= _MOST_SUMMED):
        amounts = value if is_measured else value == low
        others = [i for i in range(value.dim()) if i != dim % value.dim()]
        fewest, most = (amounts.sum(others) if others else amounts).aminmax()
    sign = torch.zeros_like(low) if is_measured else low
    return torch.stack([sign.float().sign(), low == high, fewest == most])
