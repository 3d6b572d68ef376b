"""Which library computes an operation here, where torch chooses by sizes."""

from __future__ import annotations

from typing import Any

import torch

from . import bound

select_conv_backend: Any = bound(
    "torch._C._select_conv_backend", "predictions of what convolutions take"
)
"""The backend of a convolution, by its arguments as ``aten::convolution`` takes them."""


def works() -> bool:
    """Whether a convolution has a backend, by which a small one is told from a large one."""
    x, w = torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3)
    return bool(str(select_conv_backend(x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)))
