"""The modules that models are made of."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def modules_below(models: Iterable[nn.Module]) -> list[nn.Module]:
    """The models and all modules below them, each once, the upper ones first."""
    found: dict[int, nn.Module] = {}
    waiting = [*models][::-1]
    while waiting:
        module = waiting.pop()
        if id(module) not in found:
            found[id(module)] = module
            below = module._modules
            if below:
                waiting += [child for child in below.values() if child is not None][::-1]
    return list(found.values())
