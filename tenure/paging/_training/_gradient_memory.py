"""Host memory that gradients are copied to, and stay in as the ``grad`` of their parameters.

Invariant: memory is given out again only when nothing shows its bytes any more, neither a tensor
nor an alias of one. A loop that lets go of its gradients takes the same memory in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tenure._cuda_blocks import up_to
from tenure._registries import NamedTensor
from tenure._torch.lending import Lent
from tenure._torch.quiet import aside

from .._model import UNIT_ALIGNMENT_BYTES, HostTensor, Unit

GRADIENTS = "paged: gradients"
"""What reports of memory call this memory, where no gradient that is in use lies in it."""


class _GradientBuffer:
    """Room for one gradient each of some of a unit's tensors."""

    def __init__(self, memory: Any, n_bytes: int) -> None:
        self.memory = torch.frombuffer(memory, dtype=torch.uint8, count=n_bytes)
        self.unit: Unit | None = None
        self._kept = memory
        self._free: dict[HostTensor, int] = {}
        self._lent: list[Lent] = []

    @property
    def is_free(self) -> bool:
        """Whether nothing shows any of its bytes."""
        return not any(lent.is_shared(0) for lent in self._lent)

    def give_to(self, unit: Unit, starts: dict[HostTensor, int]) -> None:
        """Let it be for these tensors of a unit."""
        self.unit, self._free = unit, dict(starts)
        self._lent.clear()

    def has_room_for(self, host: HostTensor) -> bool:
        """Return whether none was taken for this tensor yet."""
        return host in self._free

    def take(self, host: HostTensor) -> Tensor:
        """Return a tensor of the form of this one."""
        original = host.tensor
        lent = Lent(self.memory, self._free.pop(host), original.nbytes)
        self._lent.append(lent)
        # With these autograd takes it for the parameter's `grad` as it is, and copies none.
        strides = torch.empty_like(original, device="meta").stride()
        made: Any = torch.empty(0, dtype=original.dtype, device="cpu")
        return made.set_(lent.storage, 0, original.size(), strides)  # type: ignore[no-any-return]

    def named(self) -> NamedTensor:
        """Itself, for reports of memory."""
        inside = tuple(lent.storage for lent in self._lent)
        return NamedTensor(self.memory, "gradients", GRADIENTS, inside)


class GradientMemory:
    """Buffers for gradients, as many as are in use at the same time.

    Args:
        make: makes memory of so many bytes.
    """

    def __init__(self, make: Callable[[int], Any]) -> None:
        self._make = make
        self._buffers: list[_GradientBuffer] = []
        self._now: dict[Unit, _GradientBuffer] = {}

    @property
    def n_bytes(self) -> int:
        """What all of it takes."""
        return sum(buffer.memory.nbytes for buffer in list(self._buffers))

    def take(self, host: HostTensor) -> Tensor:
        """Return a tensor for a gradient, with the parameter's shape, dtype and dense strides."""
        unit = host.unit
        assert unit is not None
        with aside():
            buffer = self._now.get(unit)
            if buffer is None or buffer.unit is not unit or not buffer.has_room_for(host):
                buffer = self._now[unit] = self._for(unit)
            return buffer.take(host)

    def named_tensors(self) -> Iterator[NamedTensor]:
        """Yield the buffers."""
        for buffer in list(self._buffers):
            yield buffer.named()

    def close(self) -> None:
        """Forget them: who has a gradient keeps its memory."""
        self._buffers.clear()
        self._now.clear()

    def _for(self, unit: Unit) -> _GradientBuffer:
        starts, n_bytes = {}, 0
        for host in unit.tensors:
            if host.tensor.requires_grad:
                starts[host] = n_bytes
                n_bytes = up_to(n_bytes + host.tensor.nbytes, UNIT_ALIGNMENT_BYTES)
        # The smallest: where gradients are added up each unit needs one for a moment, and large
        # ones are few.
        fitting = [each for each in self._buffers if each.memory.nbytes >= n_bytes]
        for buffer in sorted(fitting, key=lambda each: each.memory.nbytes):
            if buffer.is_free:
                break
        else:
            buffer = _GradientBuffer(self._make(n_bytes), n_bytes)
            self._buffers.append(buffer)
        buffer.give_to(unit, starts)
        return buffer
