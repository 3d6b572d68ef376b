"""A block in which the dropout of modules is off, so that two runs can be compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from tenure._torch.modules import Dropout

from ._module_names import named_modules


@contextmanager
def without_dropout(roots: Mapping[str, nn.Module]) -> Iterator[None]:
    """Turn dropout off in modules, and back on at the end of the block."""
    modules = [module for _, module in named_modules(roots)]
    training = [m for m in modules if isinstance(m, Dropout | nn.RReLU) and m.training]
    rated: list[Any] = [m for m in modules if isinstance(m, nn.MultiheadAttention | nn.RNNBase)]
    rates = [each.dropout for each in rated]
    try:
        for module in training:
            module.training = False
        for each in rated:
            each.dropout = 0.0
        yield
    finally:
        for module in training:
            module.training = True
        for each, rate in zip(rated, rates, strict=True):
            each.dropout = rate
