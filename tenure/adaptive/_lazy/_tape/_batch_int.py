"""Sizes that remember how they depend on the number of samples.

Invariant: a `BatchInt` is the number that plain PyTorch would have; only a replay with another
number of samples asks what it is there.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Self


class BatchInt(int):
    """A size that was computed from the number of samples.

    Attributes:
        at: gives the size for any number of samples.
    """

    at: Callable[[int], int]

    def __new__(cls, value: int, at: Callable[[int], int]) -> Self:
        made = super().__new__(cls, value)
        made.at = at
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int(self),)

    def __neg__(self) -> BatchInt:
        return BatchInt(-int(self), lambda n: -self.at(n))

    def __pos__(self) -> BatchInt:
        return self


def at(value: Any, n_samples: int) -> int:
    """What a size is for so many samples."""
    result: int = value.at(n_samples) if type(value) is BatchInt else value
    return result


def _remembering(apply: Callable[[int, int], int], *, reflected: bool) -> Callable[..., Any]:
    def method(self: BatchInt, other: Any) -> Any:
        if not isinstance(other, int):
            return NotImplemented
        left, right = (other, self) if reflected else (self, other)
        value = apply(int(left), int(right))
        return BatchInt(value, lambda n: apply(at(left, n), at(right, n)))

    return method


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    for _prefix in ("", "r"):
        _method = _remembering(getattr(operator, _name), reflected=bool(_prefix))
        setattr(BatchInt, f"__{_prefix}{_name}__", _method)
