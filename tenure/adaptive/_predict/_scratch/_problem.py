"""An operation of which only the layouts are known, and the same one made smaller.

Sizes are told apart by their values: where 4096 is made smaller in one argument, it is in all of
them, in shapes as well as among plain integers (``output_size``, ``normalized_shape``). What that
breaks, an operation whose sizes depend on each other in another way, raises when it is run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ._extrapolation import Axis, Corner
from ._stand_ins import Layout, layout_of

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of an operation, with a Layout for each tensor."""

# Smaller integers may be a dimension, a kernel's width or a flag, as well as a size.
_LEAST_SIZE = 64
# Sizes are made smaller by multiples of this: what kernels pad channels and rows to.
_GRAIN = 32


def described(args: Any, kwargs: Any) -> Call:
    """The arguments with a Layout for each tensor."""
    take: Callable[[Any], Any] = lambda leaf: (  # noqa: E731
        layout_of(leaf) if isinstance(leaf, Tensor) else leaf
    )
    return _mapped(tuple(args), take), _mapped(dict(kwargs), take)


def made(call: Call, whole: int) -> Call:
    """The arguments with a real tensor for each Layout; whole numbers are ``whole``."""

    def make(leaf: Any) -> Any:
        if isinstance(leaf, Layout):
            return leaf.tensor(whole)
        if isinstance(leaf, torch.Generator):
            # drawing from the program's own would change its numbers
            return torch.Generator()
        return leaf

    return _mapped(call[0], make), _mapped(call[1], make)


def layouts(tree: Any) -> Iterator[Layout]:
    """All layouts of a call."""
    if isinstance(tree, Layout):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for each in tree:
            yield from layouts(each)
    elif isinstance(tree, dict):
        for each in tree.values():
            yield from layouts(each)


def axes_of(call: Call, out: Any, limit_bytes: int, rungs: tuple[int, ...] = ()) -> list[Axis]:
    """Which sizes to make smaller, and how far, until all tensors of a call stay below a limit.

    No size falls below one of ``rungs`` that it was above: there a kernel changes its ways.
    """
    tensors = [*layouts(call), *layouts(out)]
    counts = Counter(n for each in tensors for n in set(each.shape) if n >= _LEAST_SIZE)
    sizes = {n: n for n in counts}
    floors = {n: max((rung for rung in rungs if rung <= n), default=0) for n in counts}
    while _n_bytes(tensors, sizes) > limit_bytes:
        shrinkable = [n for n in sizes if floors[n] <= _smaller(sizes[n]) < sizes[n]]
        if not shrinkable:
            break
        largest = max(shrinkable, key=sizes.__getitem__)
        sizes[largest] = _smaller(sizes[largest])
    return [Axis(n, small, _GRAIN) for n, small in sizes.items() if small < n]


def smaller(call: Call, axes: list[Axis], corner: Corner) -> Call:
    """The call at the bases of all axes, or one step along those of a corner."""
    sizes = {a.target: a.base + (a.step if i in corner else 0) for i, a in enumerate(axes)}

    def shrink(leaf: Any) -> Any:
        if isinstance(leaf, Layout):
            return leaf.resized([sizes.get(n, n) for n in leaf.shape])
        return sizes.get(leaf, leaf) if type(leaf) is int else leaf

    return _mapped(call[0], shrink), _mapped(call[1], shrink)


def _smaller(n: int) -> int:
    blocks = n // _GRAIN
    return _GRAIN * (blocks // 2) + n % _GRAIN if blocks > 1 else n


def _n_bytes(tensors: list[Layout], sizes: dict[int, int]) -> int:
    return sum(each.resized([sizes.get(n, n) for n in each.shape]).n_bytes for each in tensors)


def _mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(tree, (list, tuple)):
        return type(tree)([_mapped(each, change) for each in tree])
    if isinstance(tree, dict):
        return {key: _mapped(each, change) for key, each in tree.items()}
    return change(tree)
