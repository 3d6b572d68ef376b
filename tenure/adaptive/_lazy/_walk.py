"""Arguments of a call, taken apart: what is stored of them, and what makes two calls alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._handle import Handle
from ._names import names
from ._shapes import rebuilt
from ._tape import BatchInt, Ref

_ELSEWHERE = 10007
"""A number of samples: sizes that are alike here and differ there depend on it in other ways."""


_PLAIN = frozenset({int, bool, str, type(None), torch.dtype, torch.device, torch.layout,
                    torch.memory_format, type(...), bytes})  # fmt: skip


_WITH_RATES = frozenset(
    names(
        """
        add sub rsub mul div true_divide pow add_ sub_ mul_ div_ __add__ __radd__ __sub__
        __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __iadd__ __isub__
        __imul__ __itruediv__ dropout masked_fill masked_fill_ clamp clip fill_ where lerp
        gt lt ge le eq ne
        """
    )
)


class Walk:
    """Takes arguments apart: what is stored of them, and what makes two calls alike.

    Args:
        func: the function that is called; None where ``key`` is not wanted.

    Attributes:
        key: what is equal for two calls that are alike.
        is_known: whether that can be told; an object of another kind may be anything.
        lazies: the recorded tensors, as often as they are given.
        plains: the others, each once.
        generators: the random generators.
        has_sizes: whether a size of the batch is among them.
        has_rates: whether numbers of floating point are factors, which make no other call.
        has_graph: whether a plain tensor came with a graph.
        cuts: what stands for a plain tensor that is a leaf, by its id.
        places: which tensor is given how early, by its id.
    """

    __slots__ = (
        "cuts",
        "generators",
        "has_graph",
        "has_rates",
        "has_sizes",
        "is_known",
        "key",
        "lazies",
        "places",
        "plains",
    )

    def __init__(self, func: Any = None) -> None:
        self.has_rates = getattr(func, "__name__", "") in _WITH_RATES
        self.key: list[Any] = []
        self.lazies: list[Handle] = []
        self.plains: list[Tensor] = []
        self.places: dict[int, int] = {}
        self.has_sizes = self.has_graph = False
        self.is_known = True
        self.cuts: dict[int, Ref] = {}
        self.generators: list[torch.Generator] = []

    def take(self, value: Any) -> Any:
        """What is stored of an argument, with a `Ref` for each recorded tensor in it."""
        kind, key = type(value), self.key
        if isinstance(value, Handle):
            # f(x, x) is another call than f(x, y)
            key.append((value._meta, self._place_of(value)))
            self.lazies.append(value)
            return Ref(value._number)
        if isinstance(value, Tensor):
            cut = self.cuts.get(id(value))
            if cut is not None:
                return cut
            place = self._place_of(value)
            if all(value is not other for other in self.plains):
                self.plains.append(value)
            # autograd recorded what it was computed by, and runs that backward once
            self.has_graph |= value.requires_grad and not value.is_leaf
            key.append((kind is Tensor, value.shape, value.stride(), value.dtype, value.device,
                        value.requires_grad, value.is_leaf, place))  # fmt: skip
            return value
        if kind in _PLAIN:
            key.append((kind, value))
            return value
        if kind is float:
            # a factor or a rate, which may change with each call; elsewhere it may be a shape
            key.append(kind if self.has_rates else (kind, value))
            return value
        if kind is BatchInt:
            self.has_sizes = True
            key.append((kind, int(value), value.at(_ELSEWHERE)))
            return value
        return self._take_container(value, kind)

    def _place_of(self, tensor: Tensor) -> int:
        return self.places.setdefault(id(tensor), len(self.places))

    def _take_container(self, value: Any, kind: type) -> Any:
        key = self.key
        if kind is tuple or kind is torch.Size:
            key.append((kind, len(value)))
            return tuple([self.take(each) for each in value])
        if kind is list:
            key.append((kind, len(value)))
            return [self.take(each) for each in value]
        if kind is dict:
            key.append((kind, *value))
            return {name: self.take(each) for name, each in value.items()}
        if kind is slice:
            key.append(kind)
            return slice(*[self.take(each) for each in (value.start, value.stop, value.step)])
        if isinstance(value, tuple | list):
            key.append((kind, len(value)))
            return rebuilt(value, [self.take(each) for each in value])
        if isinstance(value, int | float | complex):
            key.append((kind, value))
            return value
        if isinstance(value, torch.Generator):
            key.append((kind, value.device))
            self.generators.append(value)
            return value
        self.is_known = False
        return value
