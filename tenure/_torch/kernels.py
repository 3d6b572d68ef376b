"""Which library computes an operation here, where torch chooses by sizes."""

from __future__ import annotations

from typing import Any

from . import bound

select_conv_backend: Any = bound(
    "torch._C._select_conv_backend", "predictions of what convolutions take"
)
"""The backend of a convolution, by its arguments as ``aten::convolution`` takes them."""
