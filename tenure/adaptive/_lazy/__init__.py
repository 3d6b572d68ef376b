"""Tensors that are recorded first, and computed in parts where the whole does not fit."""

from ._lazy import lazy as lazy
from ._tensor import LazyTensor as LazyTensor
