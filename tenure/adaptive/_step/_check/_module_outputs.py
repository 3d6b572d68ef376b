"""What each module returned in a run, to find the first that mixes the samples of its batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._modules import named_modules
from ._compare import relative_error


class ModuleCall(NamedTuple):
    """A call of a module.

    Attributes:
        name: the module, as its root and its path below that.
        kind: its type.
        output: a copy of the first tensor of floating point that it returned.
    """

    name: str
    kind: str
    output: Tensor


@contextmanager
def recorded(roots: Mapping[str, nn.Module]) -> Iterator[list[ModuleCall]]:
    """Note the output of each call of each module in the block, innermost first."""
    calls: list[ModuleCall] = []
    handles = [
        module.register_forward_hook(_recorder(name, calls))
        for name, module in named_modules(roots)
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def first_difference(
    whole: list[ModuleCall], chunks: list[list[ModuleCall]], lengths: Sequence[int], rtol: float
) -> tuple[ModuleCall, float] | None:
    """The first call whose outputs for the chunks are not those for the whole, and how far off."""
    if any(len(chunk) != len(whole) for chunk in chunks):
        return None
    for call, *parts in zip(whole, *chunks, strict=True):
        outputs = [part.output for part in parts]
        if not _has_samples(call.output, outputs, lengths):
            continue
        error = relative_error(torch.cat(outputs), call.output)
        if not error <= rtol:  # NaN is off as well
            return call, error
    return None


def _recorder(name: str, calls: list[ModuleCall]) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        first = _first_tensor(output)
        if first is not None:
            calls.append(ModuleCall(name, type(module).__name__, first.detach().clone()))

    return hook


def _first_tensor(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    children = output.values() if isinstance(output, Mapping) else output
    if isinstance(children, tuple | list) or isinstance(output, Mapping):
        return next(
            (found for child in children if (found := _first_tensor(child)) is not None), None
        )
    return None


def _has_samples(whole: Tensor, parts: list[Tensor], lengths: Sequence[int]) -> bool:
    """Whether the outputs have one row a sample (or a fixed number of rows)."""
    if whole.dim() == 0 or whole.shape[0] == 0 or whole.shape[0] % sum(lengths):
        return False
    per_sample = whole.shape[0] // sum(lengths)
    return all(
        part.dim() == whole.dim()
        and part.shape[0] == per_sample * length
        and part.shape[1:] == whole.shape[1:]
        for part, length in zip(parts, lengths, strict=True)
    )
