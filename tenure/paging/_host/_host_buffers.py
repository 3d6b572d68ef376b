"""The host's side: one flat buffer for each unit, which the parameters of the unit alias.

Invariant: the model's bytes are on the host once. A unit is copied into its buffer and its tensors
are pointed there before the next unit's buffer is made, and each tensor keeps a storage of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, UntypedStorage

from tenure._account import moved
from tenure._errors import PagingError
from tenure._registries import NamedTensor
from tenure._show import progress
from tenure._text import describe_tensor
from tenure._torch.storages import byte_range, key_of

from .._model import Extent, HostTensor, Unit
from ._pinning import Memory, Pinning, private_memory

HOST = "paged: host"
"""What reports of memory call the buffers; the model's tensors lie in them."""


class HostBuffers:
    """Buffers in ordinary memory, pinned in place where the device can.

    Args:
        device: the device, with its index.
        pin: whether to pin.
        advice: what to do where that is not possible.

    Raises:
        torch.AcceleratorError: an earlier call of the user's has left an error behind.
    """

    def __init__(self, device: torch.device, *, pin: bool, advice: str = "") -> None:
        self._bytes: dict[Unit, Tensor] = {}
        self._memory: dict[Unit, Memory] = {}
        # by unit, and the byte of its buffer at which they begin
        self._parts: dict[Unit, dict[int, weakref.ref[UntypedStorage]]] = {}
        self._pinning = Pinning(device, advice) if pin else None

    @property
    def host_bytes(self) -> int:
        """The buffers' bytes."""
        return sum(memory.nbytes for memory in self._bytes.values())

    @property
    def pinned_bytes(self) -> int:
        """How much of them is pinned."""
        return 0 if self._pinning is None else self._pinning.n_bytes

    def memory(self, n_bytes: int) -> Memory:
        """More memory such as the buffers are; it is pinned as long as they are."""
        return private_memory(n_bytes) if self._pinning is None else self._pinning.memory(n_bytes)

    def adopt(self, units: Iterable[Unit]) -> None:
        """Move the tensors of units into buffers; values, strides and identity stay."""
        todo = list(units)
        n_bytes = sum(unit.n_bytes for unit in todo)
        with progress("moving weights", n_bytes, in_bytes=True) as done:
            # One unit after the other: its old memory goes before the next buffer is made, so that
            # the host never holds the model twice.
            for unit in todo:
                self._adopt(unit)
                done(unit.n_bytes)

    def _adopt(self, unit: Unit) -> None:
        """Move the tensors of a unit into a new buffer; if interrupted, the next use does it."""
        memory = self.memory(unit.n_bytes)
        before = self._memory.get(unit)
        self._bytes.pop(unit, None)
        self._memory[unit], self._parts[unit] = memory, {}
        for extent, start in unit.starts():
            part = self._part(unit, extent, start)
            if extent.tensors[0].has_left:
                _bring_back(extent.tensors[0], part, start)
            else:
                _move(extent, part, start)
        self._bytes[unit] = torch.frombuffer(memory, dtype=torch.uint8, count=unit.n_bytes)
        if self._pinning is not None and before is not None:
            self._pinning.release(before)

    def bytes_of(self, unit: Unit) -> Tensor:
        """Return the buffer of a unit, with what was given other memory meanwhile back in it.

        Raises:
            PagingError: a tensor has another type, shape or device than when it was paged, or has
                memory of another one.
        """
        left = {
            host: (extent, start)
            for extent, start in unit.starts()
            for host in extent.tensors
            if host.has_left
        }
        for host, (extent, _) in left.items():
            _check_form(host, extent)
        if left:
            self._refuse_ties(left)
        parts = self._parts[unit]
        if unit not in self._bytes or any(parts[at]() is not None for _, at in left.values()):
            # Who has kept what was there, or has swapped two weights, finds it unchanged.
            self._adopt(unit)
        for host, (extent, start) in left.items():
            if host.has_left:
                _bring_back(host, self._part(unit, extent, start), start)
        return self._bytes[unit]

    def _refuse_ties(self, left: Iterable[HostTensor]) -> None:
        """Refuse tensors with memory of others: in buffers they would come apart.

        Raises:
            PagingError: there is one.
        """
        places: dict[int, list[tuple[HostTensor, int, int]]] = {}
        for host in left:
            key = key_of(host.tensor.untyped_storage())
            places.setdefault(key, []).append((host, *byte_range(host.tensor)))
        for other in (each for unit in self._parts for each in unit.tensors):
            there = places.get(key_of(other.tensor.untyped_storage()), ())
            low, high = byte_range(other.tensor) if there else (0, 0)
            for host, start, end in there:
                if host is not other and start < high and low < end:
                    raise PagingError(
                        f"{host.name!r} was given the memory of {other.name!r} while it is paged, "
                        "and would be separated from it. Call unpage(), tie them, and page the "
                        "model again; or give it a clone()."
                    )

    def named_tensors(self) -> Iterator[NamedTensor]:
        """Yield the buffers, and for each the storages of the model's tensors in it."""
        for unit, memory in list(self._bytes.items()):
            alive = (part() for part in list(self._parts[unit].values()))
            inside = tuple(storage for storage in alive if storage is not None)
            yield NamedTensor(memory, unit.name, HOST, inside)

    def close(self) -> None:
        """Unpin the buffers; the tensors of the model keep them as ordinary memory."""
        if self._pinning is not None:
            self._pinning.undo()
        self._parts.clear()
        self._bytes.clear()
        self._memory.clear()

    def _part(self, unit: Unit, extent: Extent, start: int) -> Tensor:
        """Return the bytes of an extent in the buffer of its unit, as a storage of their own."""
        # A storage of its own for each extent: torch.save writes whole storages, and the state dict
        # of a layer would have its whole unit in it.
        memory, n_bytes = self._memory[unit], extent.n_bytes
        part = torch.frombuffer(memory, dtype=torch.uint8, count=n_bytes, offset=start)
        self._parts[unit][start] = weakref.ref(part.untyped_storage())
        return part


def _move(extent: Extent, new: Tensor, start: int) -> None:
    """Copy an extent to its place in a buffer, and point its tensors there."""
    old = torch.empty(0, dtype=torch.uint8, device="cpu")
    moved(extent.tensors[0].tensor, new)
    new.copy_(old.set_(extent.storage, extent.low_byte, (extent.n_bytes,), (1,)))
    point_at(extent, new, start)


def point_at(extent: Extent, part: Tensor, start: int) -> None:
    """Let the tensors of an extent lie in other memory that holds the same bytes.

    Args:
        extent: the extent.
        part: uint8[extent.n_bytes], with a storage of its own.
        start: where the extent begins in its unit.
    """
    extent.low_byte = 0
    for host in extent.tensors:
        _point(host, part, start)


def _point(host: HostTensor, part: Tensor, start: int, *, keep_values: bool = False) -> None:
    """Let a tensor lie in a part of a buffer that begins at byte ``start`` of its unit."""
    tensor = host.tensor
    offset = (host.at_bytes - start) // tensor.element_size()
    # Given other memory it may have other strides, but the page on the device has those of the
    # first time.
    strides = tensor.stride() if not host.home else host.home_strides
    # Of the tensor's own kind, whatever mode the caller is in: with data made in inference mode a
    # tensor no longer counts its writes, and with other data one made there raises when asked.
    with torch.inference_mode(tensor.is_inference()):
        there = torch.empty(0, dtype=tensor.dtype, device="cpu")
        there.set_(part.untyped_storage(), offset, tensor.size(), strides)
        if keep_values:
            there.copy_(tensor.detach())
        # The object stays: optimizers, hooks and tied modules refer to it.
        tensor.data = there
    host.remember_home()


def _bring_back(host: HostTensor, part: Tensor, start: int) -> None:
    """Copy a tensor that was given other memory into its part of a buffer, and let it lie there."""
    moved(host.tensor, part)
    host.n_given += 1
    with torch.no_grad():
        _point(host, part, start, keep_values=True)


def _check_form(host: HostTensor, extent: Extent) -> None:
    # Of two tensors over the same bytes, one that left would leave the other with old values.
    if host.form != host.home_form or len(extent.tensors) > 1:
        raise PagingError(
            f"{host.name!r} was given other memory while it is paged, through .data or a method "
            f"such as half() or to(), and is now {describe_tensor(host.tensor)}: that can't "
            "be paged in its place. Call unpage(), change the model, and page it again."
        )
