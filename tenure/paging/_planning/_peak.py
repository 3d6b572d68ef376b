"""What a paged model takes of the device beside its weights, told before it runs.

The model runs on tensors without data, as `tenure.adaptive.predict_peak` has it; gradients leave,
and activations if that is wanted, as they do where it is paged. The only module of paging that asks
`adaptive` for something, and only where a plan is given inputs.

Invariant: the model is left as it was, and nothing is allocated or computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks

from tenure._containers import tensors_in
from tenure._cuda_blocks import rounded
from tenure._errors import PagingError
from tenure._torch.storages import key_of

from .._device import PassMeter
from .._model import Unit
from .._training import MOST_UNITS, Activations, HostBytes, Moved

_CACHES = ("cache", "past_key_values", "cache_params", "mems")
"""What models of transformers call what they want back in their next call."""


class Beside(NamedTuple):
    """What is on the device beside weights, at the worst moment.

    Attributes:
        n_bytes: activations, inputs, gradients on their way, and what operations take meanwhile.
        cache_bytes: what the result of the model keeps for the next call, as models that generate
            do; it grows with each.
        allowance_bytes: what kernels may take on top, of which only the device could tell.
    """

    n_bytes: int
    cache_bytes: int
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
    cache_bytes = 0

    def run(*args: Any, **kwargs: Any) -> None:
        nonlocal cache_bytes
        with torch.set_grad_enabled(units is not None):
            with _on_host(model, args, kwargs, device) if moves else nullcontext():
                output = model(*args, **kwargs)
            cache_bytes = _bytes_of_caches(output)
            if units is not None:
                with _gradients_leave(units):
                    _run_backward(output)

    report = predict_peak(run, *args, device=device, **kwargs)
    weights = {key_of(t.untyped_storage()): t for t in (*model.parameters(), *model.buffers())}
    sizes = [t.untyped_storage().nbytes() for t in weights.values()]
    if report.allocated_bytes is None:
        n_bytes = report.peak_bytes - sum(sizes)
    else:
        n_bytes = report.allocated_bytes - sum(map(rounded, sizes))
    return Beside(n_bytes, cache_bytes, report.allowance_bytes)


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
    """As after a loss that takes nothing: only its gradient is there."""
    loss = getattr(output, "loss", None)
    outputs = [loss] if isinstance(loss, Tensor) else tensors_in([output])
    ends = [each for each in outputs if each.requires_grad]
    del output, outputs, loss
    if ends:
        torch.autograd.backward(ends, [torch.ones_like(each) for each in ends])


@contextmanager
def _gradients_leave(units: list[Unit]) -> Iterator[None]:
    """A block in which gradients are there as long as they are on their way to the host."""
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


def _bytes_of_caches(output: Any) -> int:
    own = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
    # Looked at as they are: to ask for one by an old name warns.
    found = [value for name, value in own.items() if name in _CACHES]
    storages = [each.untyped_storage() for each in _tensors_below(found)]
    return sum({key_of(each): each.nbytes() for each in storages}.values())


def _tensors_below(value: Any) -> Iterator[Tensor]:
    """Those of a cache, which may be an object with layers."""
    waiting, seen = [value], set()
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, type | nn.Module):
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, Mapping):
            waiting += each.values()
        elif isinstance(each, list | tuple):
            waiting += each
        else:
            waiting += getattr(each, "__dict__", {}).values()


def _on_host(
    model: nn.Module, args: Any, kwargs: Any, device: torch.device
) -> AbstractContextManager[object]:
    """A block in which what graphs save is on the host."""
    imagined = _Imagined(device)
    given = (each for each in tensors_in([args, kwargs]) if each.grad_fn is None)
    imagined.leave([*model.parameters(), *model.buffers(), *given])

    def pack(tensor: Tensor) -> Any:
        moved = imagined.take(tensor)
        return tensor.detach() if moved is None else moved

    def unpack(packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else imagined.give(packed)

    return saved_tensors_hooks(pack, unpack)


class _Imagined(Activations):
    """The same of tensors without data: they come and go, and no byte is copied."""

    def __init__(self, device: torch.device) -> None:
        nothing: Any = _Nothing(device)
        super().__init__(nothing, nothing, PassMeter())

    def _is_known(self, tensor: Tensor) -> bool:
        return True

    def _unseen(self) -> AbstractContextManager[None]:
        return torch.no_grad()

    def _writes_of(self, tensor: Tensor) -> Tensor:
        # Nobody asks: what raises does so when it runs.
        return tensor.new_empty(0)

    def _count_together(self, tensor: Tensor, writes: Tensor) -> bool:
        return True

    def _bytes_of(self, tensor: Tensor, storage: UntypedStorage, start: int, end: int) -> Tensor:
        # A tensor without data that is given a storage would keep it for good.
        return tensor.detach()

    def _over(self, storage: UntypedStorage, base: int, moved: Moved) -> Tensor:
        here, (_, size, strides) = moved.away.bytes.here, moved.form
        if here is None:
            # Somebody else has it: any form that takes nothing.
            return torch.empty((), dtype=moved.dtype, device=self._link.device).expand(size)
        if here.dtype is not moved.dtype:
            here = here.detach().as_strided((here.untyped_storage().nbytes(),), (1,), 0)
            here = here.view(moved.dtype)
        return here.detach().as_strided(size, strides, 0)


class _Nothing:
    """A link that copies nothing, and memory that takes nothing."""

    stream_id = 0
    memory: Any = None

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def current(self) -> _Nothing:
        return self

    def mark(self, stream: Any) -> None:
        return None

    def take(self, n_bytes: int) -> HostBytes:
        nothing: Any = None
        return HostBytes(nothing, [], nothing, 0)

    def give_back(self, given: HostBytes, event: Any) -> None:
        return None

    def page_out(self, pairs: Any, after: Any) -> None:
        return None

    def page_in(self, pairs: Any, after: Any) -> tuple[None, None]:
        return None, None

    def let_compute(self, stream: Any, event: Any) -> tuple[None, None]:
        return None, None
