"""What else decides how much memory a size needs: the modes of torch, and the arguments.

Invariant: equal signatures in two processes mean equal circumstances; the size of the dimension
that is split is no part of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from tenure._text import describe_elements, dtype_name, shape_of
from tenure._torch.quiet import without_functions

_SEPARATOR = " | "
_ADDING = ", adding gradients"


def signature_of(
    args: Iterable[object],
    kwargs: Mapping[str, object],
    chunked: Tensor | None = None,
    dimension: int = 0,
    *,
    adds_gradients: bool = False,
) -> str:
    """Spell the circumstances of a call.

    Args:
        args: what is passed on by position; tensors count with dtype, device and shape without the
            first dimension, modules with their mode of training, other things not at all.
        kwargs: what is passed on by name.
        chunked: the tensor of any shape that is split.
        dimension: the dimension of ``chunked`` that is split.
        adds_gradients: whether gradients of before stand beside those that the call makes.

    Example:
        >>> signature_of((torch.ones(8, 3), "other"), {})
        'grad | float32[*, 3] on cpu'
    """
    parts = [_spelled(chunked, dimension)] if chunked is not None else []
    parts += [spelled for value in args if (spelled := _spelled(value))]
    parts += [f"{key}={spelled}" for key, value in kwargs.items() if (spelled := _spelled(value))]
    return _SEPARATOR.join([_modes() + _ADDING * adds_gradients, *parts])


def circumstances_in(signature: str) -> tuple[str, bool]:
    """Return the modes in a signature, and whether gradients of before are there."""
    modes = signature.partition(_SEPARATOR)[0]
    return modes.removesuffix(_ADDING), modes.endswith(_ADDING)


def _modes() -> str:
    grad = "inference" if torch.is_inference_mode_enabled() else "no grad"
    modes = ["grad" if torch.is_grad_enabled() else grad]
    accelerator = torch.accelerator.current_accelerator()
    # autocast of both counts: work on a device often has parts on the host
    kinds = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    for kind in kinds:
        if torch.is_autocast_enabled(kind):
            dtype = dtype_name(torch.get_autocast_dtype(kind))
            modes.append(f"autocast {kind} {dtype}")
    return ", ".join(modes)


def _spelled(value: object, dimension: int = 0) -> str:
    if isinstance(value, nn.Module):
        return f"{type(value).__name__} in {'training' if value.training else 'evaluation'}"
    # numbers and texts don't count: they differ from call to call where the memory does not
    if not isinstance(value, Tensor):
        return ""
    with without_functions():
        # rows of different lengths have a size of their own in each batch, which is no number
        sizes = [str(n) if isinstance(n, int) else "ragged" for n in shape_of(value)]
        sizes[dimension : dimension + 1] = ["*"] * bool(sizes)
        return f"{describe_elements(value.dtype, sizes)} on {value.device}"
