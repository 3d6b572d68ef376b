"""The operations of kernels that torch's counter does not know."""

from __future__ import annotations

from typing import Any

from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from . import optional

_ATTENTION = "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu"


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query, key, value)  # type: ignore[no-any-return]


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(grad, query, key, value)  # type: ignore[no-any-return]


_counted = {
    optional(_ATTENTION): _attention,
    optional(f"{_ATTENTION}_backward"): _attention_backward,
}
OF_THE_CPU: dict[Any, Any] = {kernel: count for kernel, count in _counted.items() if kernel}
"""By kernel of the CPU, what counts its operations; torch has those of accelerators."""
