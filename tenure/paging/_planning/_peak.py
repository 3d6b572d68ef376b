"""What a paged model takes of the device beside its weights, told before it runs.

The model runs on tensors without data, as `tenure.adaptive.predict_peak` has it; gradients leave,
and activations if that is wanted, as they do where it is paged. The only module of paging that asks
`adaptive` for something, and only where a plan is given inputs.

Invariant: the model is left as it was, and nothing is allocated or computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from tenure._containers import tensors_in
from tenure._cuda_blocks import rounded
from tenure._errors import PagingError
from tenure._torch.storages import key_of

from .._model import Unit
from .._training import LARGEST_PIECES, MOST_UNITS, SMALL_BYTES, range_to_move


class Beside(NamedTuple):
    """What is on the device beside weights, at the worst moment.

    Attributes:
        n_bytes: activations, inputs, gradients on their way, and what operations take meanwhile.
        allowance_bytes: what kernels may take on top, of which only the device could tell.
    """

    n_bytes: int
    allowance_bytes: int


def predicted_beside(
    model: nn.Module, inputs: Any, device: torch.device, units: list[Unit] | None, *, moves: bool
) -> Beside:
    """Predict what a pass takes.

    Args:
        model: on the host, or on meta.
        inputs: one tensor, a tuple of arguments, or a dictionary of them by name.
        device: where it is to be paged.
        units: of a model that is trained; None for a pass without gradients.
        moves: whether activations go to the host.

    Raises:
        PagingError: the inputs are no arguments.
        PredictionError: nothing can be said of the model's memory.
    """
    from tenure.adaptive import predict_peak

    args, kwargs = _arguments(inputs)
    largest_bytes = 0

    def run(*args: Any, **kwargs: Any) -> None:
        nonlocal largest_bytes
        given = [each for each in tensors_in([args, kwargs]) if each.grad_fn is None]
        others = {key_of(each.untyped_storage()) for each in (*_tensors_of(model), *given)}
        on_host = _SimulatedHost(device, others)
        with torch.set_grad_enabled(units is not None):
            with saved_tensors_hooks(on_host.pack, on_host.unpack) if moves else nullcontext():
                output = model(*args, **kwargs)
            largest_bytes = on_host.largest_bytes
            if units is not None:
                with _gradients_leave(units):
                    _run_backward(output)

    report = predict_peak(run, *args, device=device, **kwargs)
    weights = {key_of(each.untyped_storage()): each for each in _tensors_of(model)}
    sizes = [t.untyped_storage().nbytes() for t in weights.values()]
    if report.allocated_bytes is None:
        n_bytes = report.peak_bytes - sum(sizes)
    else:
        n_bytes = report.allocated_bytes - sum(map(rounded, sizes))
    return Beside(n_bytes + LARGEST_PIECES * largest_bytes, report.allowance_bytes)


def _tensors_of(model: nn.Module) -> Iterator[Tensor]:
    yield from (*model.parameters(), *model.buffers())


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, list | tuple):
        return tuple(inputs), {}
    raise PagingError(
        f"inputs= got {type(inputs).__name__}: give what the model is called with, a tensor, a "
        "tuple of arguments, or a dictionary of them by name. Tensors of meta will do."
    )


def _run_backward(output: Any) -> None:
    """Run backward as from a loss without memory of its own: only its gradient exists."""
    loss = getattr(output, "loss", None)
    outputs = [loss] if isinstance(loss, Tensor) else tensors_in([output])
    ends = [each for each in outputs if each.requires_grad]
    del output, outputs, loss
    if ends:
        torch.autograd.backward(ends, [torch.ones_like(each) for each in ends])


@contextmanager
def _gradients_leave(units: list[Unit]) -> Iterator[None]:
    """Return a block in which gradients are there as long as they are on their way to the host."""
    under_way: dict[Unit, list[Tensor]] = {}

    def leaving(unit: Unit) -> Callable[[Tensor], None]:
        def leave(parameter: Tensor) -> None:
            while unit not in under_way and len(under_way) >= MOST_UNITS:
                del under_way[next(iter(under_way))]
            if parameter.grad is not None:
                under_way.setdefault(unit, []).append(parameter.grad)
            parameter.grad = None

        return leave

    with ExitStack() as hooks:
        for unit in units:
            for host in unit.tensors:
                if host.tensor.requires_grad and host.tensor.is_leaf:
                    handle = host.tensor.register_post_accumulate_grad_hook(leaving(unit))
                    hooks.callback(handle.remove)
        yield


class _SimulatedHost:
    """Holds what graphs save, away from the device until a node asks for it.

    In truth the largest pieces stay for a while, and come back ahead: the caller adds them.

    Args:
        device: where the model computes.
        others: the storages that stay, because others keep them.

    Attributes:
        largest_bytes: of what was saved.
    """

    def __init__(self, device: torch.device, others: set[int]) -> None:
        self._device, self._others = device, others
        self.largest_bytes = 0

    def pack(self, tensor: Tensor) -> Any:
        """Return what a node keeps in place of a tensor."""
        is_parameter = tensor.requires_grad and tensor.is_leaf
        stays = tensor.numel() * tensor.element_size() < SMALL_BYTES or is_parameter
        if stays or key_of(tensor.untyped_storage()) in self._others:
            return tensor.detach()
        start, end = range_to_move(tensor)
        self.largest_bytes = max(self.largest_bytes, end - start)
        return tensor.dtype, tensor.size(), tensor.stride()

    def unpack(self, packed: Any) -> Tensor:
        """Return a tensor of the same form."""
        if isinstance(packed, Tensor):
            return packed
        dtype, size, strides = packed
        return torch.empty_strided(size, strides, dtype=dtype, device=self._device)
