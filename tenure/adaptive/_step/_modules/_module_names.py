"""Modules and parameters under the names by which users know them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn


def named_modules(roots: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Every module at or below the roots, each once, under a name that starts with the root's."""
    seen: set[nn.Module] = set()
    for root_name, root in roots.items():
        for name, module in root.named_modules(memo=seen):
            yield f"{root_name}.{name}" if name else root_name, module


def named_parameters(roots: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of the roots, each once."""
    seen: set[int] = set()
    for root_name, root in roots.items():
        for name, parameter in root.named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{root_name}.{name}", parameter
