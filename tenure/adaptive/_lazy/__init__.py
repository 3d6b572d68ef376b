"""Tensors that are recorded first, and computed in parts where the whole does not fit."""

from ._tensor import LazyTensor as LazyTensor
from ._tensor import lazy as lazy
