"""What a paged model takes of the device beside its weights, told before it runs.

The model runs on tensors without data, as `tenure.adaptive.predict_peak` has it; gradients leave,
and activations if that is wanted, as they do where it is paged. The only module of paging that asks
`adaptive` for something, and only where a plan is given inputs.

Invariant: the model is left as it was, and nothing is allocated or computed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks

from tenure._containers import tensors_in
from tenure._cuda_blocks import rounded
from tenure._errors import PagingError
from tenure._torch.storages import key_of

from .._model import Unit
from .._training import LARGEST_PIECES, MOST_UNITS, SMALL_BYTES, range_to_move

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
        given = [each for each in tensors_in([args, kwargs]) if each.grad_fn is None]
        others = {key_of(each.untyped_storage()) for each in (*_tensors_of(model), *given)}
        on_host = _SimulatedHost(device, others)
        with torch.set_grad_enabled(units is not None):
            with saved_tensors_hooks(on_host.pack, on_host.unpack) if moves else nullcontext():
                output = model(*args, **kwargs)
            cache_bytes = _bytes_of_caches(output)
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
    return Beside(n_bytes, cache_bytes, report.allowance_bytes)


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


def _bytes_of_caches(output: Any) -> int:
    own = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
    # Looked at as they are: to ask for one by an old name warns.
    found = [value for name, value in own.items() if name in _CACHES]
    storages = [each.untyped_storage() for each in _tensors_below(found)]
    return sum({key_of(each): each.nbytes() for each in storages}.values())


def _tensors_below(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a cache, which may be an object with layers."""
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


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Piece:
    """Bytes of a storage that a graph has saved.

    Attributes:
        n_bytes: how many.
        storage: the storage that has them on the device, whoever keeps it.
        here: keeps it; None while they are away.
        n_nodes: how many nodes have saved them.
        n_given: how many have had them back.
    """

    n_bytes: int
    storage: weakref.ref[UntypedStorage]
    here: Tensor | None
    n_nodes: int = 0
    n_given: int = 0


class _SimulatedHost:
    """What graphs save, coming and going as `Activations` has it; no byte is copied.

    Args:
        device: where the model computes.
        others: the storages that stay, because others keep them.
    """

    def __init__(self, device: torch.device, others: set[int]) -> None:
        self._device, self._others = device, others
        # The last one saved stands last.
        self._pieces: dict[weakref.ref[_Piece], None] = {}
        self._at: weakref.WeakValueDictionary[tuple[int, int, int], _Piece]
        self._at = weakref.WeakValueDictionary()
        self._largest_bytes = 0

    def pack(self, tensor: Tensor) -> Any:
        """Return what a node keeps in place of a tensor."""
        storage = tensor.untyped_storage()
        is_parameter = tensor.requires_grad and tensor.is_leaf
        stays = tensor.numel() * tensor.element_size() < SMALL_BYTES or is_parameter
        if stays or key_of(storage) in self._others:
            return tensor.detach()
        start, end = range_to_move(tensor)
        place = key_of(storage), start, end
        piece = self._at.get(place)
        if piece is None or piece.storage() is not storage:
            here = tensor.detach()
            piece = self._at[place] = _Piece(end - start, weakref.ref(storage), here)
            self._largest_bytes = max(self._largest_bytes, piece.n_bytes)
        piece.n_nodes += 1
        self._pieces.pop(weakref.ref(piece), None)
        self._pieces[weakref.ref(piece)] = None
        for each in self._alive():
            if self._excess_bytes() <= 0:
                break
            each.here = None
        return piece, tensor.dtype, tensor.size(), tensor.stride()

    def unpack(self, packed: Any) -> Tensor:
        """Return a tensor of the same form; what was saved before comes back ahead."""
        if isinstance(packed, Tensor):
            return packed
        piece, dtype, size, strides = packed
        is_kept = piece.here is not None
        if not is_kept and piece.storage() is not None:
            # Somebody else has it: any form that takes nothing.
            made = torch.empty((), dtype=dtype, device=self._device).expand(size)
        else:
            here = piece.here if is_kept else self._fetch(piece)
            if here.dtype is not dtype:
                flat = here.as_strided((here.untyped_storage().nbytes() // here.itemsize,), (1,), 0)
                here = flat.view(dtype)
            made = here.detach().as_strided(size, strides, 0)
        piece.n_given += 1
        if piece.n_given >= piece.n_nodes:
            piece.n_given, piece.here = 0, None
        alive = self._alive()
        for each in reversed(alive[: alive.index(piece)]):
            if each.here is None and each.storage() is None:
                if self._excess_bytes() + each.n_bytes > 0:
                    break
                self._fetch(each)
        return made

    def _fetch(self, piece: _Piece) -> Tensor:
        piece.here = torch.empty(piece.n_bytes, dtype=torch.uint8, device=self._device)
        piece.storage = weakref.ref(piece.here.untyped_storage())
        return piece.here

    def _alive(self) -> list[_Piece]:
        return [piece for each in self._pieces if (piece := each()) is not None]

    def _excess_bytes(self) -> int:
        kept_bytes = sum(each.n_bytes for each in self._alive() if each.here is not None)
        return kept_bytes - LARGEST_PIECES * self._largest_bytes
