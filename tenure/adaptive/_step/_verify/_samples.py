"""Which samples tell most about a loss: those at the ends of what each tensor of the batch holds.

A loss that counts valid labels is a mean over samples as long as each has as many: the sample with
the most ignored labels and the one with the fewest go to different ends, and so to different parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from .._samples import Leaf, SampleTree, cut_off


def chosen_samples(tree: SampleTree, n_samples: int, most: int) -> list[int]:
    """The indices of at most ``most`` samples: small values first, large ones last."""
    if n_samples <= most:
        most = n_samples
    small: list[int] = []
    large: list[int] = []
    rankings = list(_rankings(tree))
    for pairs in zip_longest(*(zip(each, reversed(each), strict=True) for each in rankings)):
        for low, high in filter(None, pairs):
            for index, end in ((low, small), (high, large)):
                if len(small) + len(large) < most and index not in small and index not in large:
                    end.append(index)
    known = {*small, *large}
    evenly = [i * n_samples // most for i in range(most)]
    rest = [i for i in dict.fromkeys([*evenly, *range(n_samples)]) if i not in known]
    middle = rest[: most - len(known)]
    return [*small, *middle, *reversed(large)]


def part_of(leaf: Leaf, indices: Sequence[int] | None) -> Any:
    """A copy of some samples of a leaf; of all of them (None) the leaf itself; without graph."""
    value = leaf.value
    if indices is None or leaf.dim is None:
        return cut_off(value)
    if leaf.dim == "items":
        return type(value)([value[i] for i in indices])
    if isinstance(value, Tensor):
        with torch.no_grad():
            picked = value.index_select(leaf.dim, torch.tensor(indices, device=value.device))
        return picked.requires_grad_() if value.requires_grad else picked
    return value.take(indices, axis=leaf.dim)


def _rankings(tree: SampleTree) -> Iterator[list[int]]:
    """The samples in order of what each leaf holds that tells them apart; labels first."""
    leaves = [leaf for leaf in tree.leaves if leaf.is_split and leaf.dim != "items"]
    for leaf in sorted(leaves, key=_is_measured):
        assert isinstance(leaf.dim, int)
        values = torch.as_tensor(leaf.value)
        if values.is_complex() or values.layout is not torch.strided or values.is_nested:
            continue
        with torch.no_grad():
            rows = values.detach().movedim(leaf.dim, 0).flatten(1) if values.dim() > 1 else values
            sums = rows.detach().sum(1, dtype=torch.float32) if rows.dim() > 1 else rows.detach()
            order: list[int] = sums.argsort(stable=True).tolist()
            if bool((sums != sums[0]).any()):
                yield order


def _is_measured(leaf: Leaf) -> bool:
    return "float" in str(getattr(leaf.value, "dtype", "float"))
