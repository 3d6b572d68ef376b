"""Rounding that is a little worse than the hardware's, to see how far it carries.

Source: Monte Carlo arithmetic, Parker 1997, https://www.cs.cmu.edu/~rutenbar/pdf/. Two kernels for
two sizes of a batch add in another order; how far their results are apart after a whole network
can't be told from the type alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tenure._torch.modes import DispatchMode, schema_of

_aten = torch.ops.aten
_EXACT = frozenset(
    {
        _aten.clone, _aten._to_copy, _aten.copy, _aten.cat, _aten.stack, _aten.index,
        _aten.index_select, _aten.gather, _aten.embedding, _aten.zeros_like, _aten.ones_like,
        _aten.full_like, _aten.empty_like, _aten.new_zeros, _aten.new_ones, _aten.new_full,
        _aten.new_empty, _aten.relu, _aten.neg, _aten.abs, _aten.sign, _aten.where, _aten.max,
        _aten.min, _aten.sort, _aten.topk, _aten.masked_fill, _aten.constant_pad_nd,
        _aten._local_scalar_dense, _aten.flip, _aten.roll, _aten.repeat, _aten.eq, _aten.ne,
        _aten.threshold_backward, _aten.maximum, _aten.minimum, _aten.clamp, _aten.round,
        _aten.floor, _aten.native_dropout,
    }
)  # fmt: skip
"""Operations that round nothing."""


class RoughRounding(DispatchMode):
    """Each operation that rounds is off by up to one more rounding, at random.

    Whole numbers stay: positions that are counted in floats are exact, and one a little less
    would be another index. What is finite stays finite, such as the largest number as a mask.

    The numbers are of a generator of its own.

    Args:
        n_roundings: by up to how many roundings.
        seed: which numbers; the same ones are as much larger with more roundings.
    """

    supports_higher_order_operators = True

    def __init__(self, n_roundings: int = 1, seed: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch left it unannotated
        self._n_roundings = n_roundings
        self._numbers = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation, and change what it made."""
        result = func(*args, **(kwargs or {}))
        if _rounds(func, args):
            for made in _tensors_in(result):
                self._change(made, self._n_roundings * _eps(func, made))
        return result

    def _change(self, made: Tensor, eps: float) -> None:
        if made.layout is not torch.strided or not made.is_floating_point():
            return
        if made.dim() and 0 in made.stride() and made.numel() > 1:
            return
        wide = made.dtype if made.dtype is torch.float64 else torch.float32
        # of the CPU: not every device lets a program make a generator
        noise = torch.rand(made.shape, dtype=wide, device="cpu", generator=self._numbers)
        factor = noise.mul_(2).sub_(1).mul_(eps).add_(1).to(made.device)
        exact = made.to(wide)
        rough = (exact * factor).to(made.dtype).to(wide)
        made.copy_(rough.where(_can_be_rounded(exact, made.dtype) & rough.isfinite(), exact))


def _can_be_rounded(made: Tensor, dtype: torch.dtype) -> Tensor:
    """Which numbers may be rounded ones; larger than these, all numbers of the type are whole."""
    return (made != made.round()) | (made.abs() >= 1 / torch.finfo(dtype).eps)


def _rounds(func: Any, args: tuple[Any, ...]) -> bool:
    schema = schema_of(func)
    if schema is None or func.overloadpacket in _EXACT:
        return False
    if any(returned.alias_info is not None for returned in schema.returns):
        return False
    return any(isinstance(arg, Tensor) and arg.is_floating_point() for arg in args)


def _tensors_in(result: Any) -> Iterator[Tensor]:
    for each in result if isinstance(result, tuple | list) else (result,):
        if isinstance(each, Tensor):
            yield each


def _eps(func: Any, made: Tensor) -> float:
    """One rounding of an operation; CUDA may compute products of float32 in TF32."""
    if not made.is_floating_point():
        return 0.0
    if made.dtype is torch.float32 and made.device.type == "cuda":
        is_convolution = "convolution" in func.overloadpacket.__name__
        precision = torch.get_float32_matmul_precision()
        if torch.backends.cudnn.allow_tf32 if is_convolution else precision != "highest":
            return 2.0**-11
    return torch.finfo(made.dtype).eps


def works() -> bool:
    """Whether a product changes below the mode, and by no more than rounding may."""
    x = torch.arange(1.0, 5.0).reshape(2, 2) / 3
    with RoughRounding():
        rough = x @ x
    return bool(not torch.equal(rough, x @ x) and torch.allclose(rough, x @ x, rtol=1e-6))
