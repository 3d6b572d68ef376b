"""The modules that models are made of."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def modules_below(models: Iterable[nn.Module]) -> list[nn.Module]:
    """The models and all modules below them, each once."""
    return list(dict.fromkeys(module for model in models for module in model.modules()))
