"""Gradients on their way to the host: which are under way, and who waits for them.

Invariant: a gradient keeps its memory on the device until its copy is over, by the device's own
time; at most those of two units are under way. The host waits for a copy where it is read first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from tenure._registries import NamedTensor
from tenure._torch.quiet import aside

from .._device import PassMeter
from .._link import Link
from .._model import HostTensor, Unit, is_plain
from ._gradient_memory import GradientMemory

MOST_UNITS = 2
"""Of so many units gradients are under way at most, and one that is computed."""


class _Sent(NamedTuple):
    gradient: Tensor
    stream: Any
    event: Any


class Homeward:
    """Takes gradients to the host.

    Args:
        link: the streams of the device.
        memory: the host memory that they are copied to.
        meter: whom to tell of waits.

    Attributes:
        copied_bytes: what went to the host.
    """

    def __init__(self, link: Link, memory: GradientMemory, meter: PassMeter) -> None:
        self._link, self._memory, self._meter = link, memory, meter
        self._under_way: dict[Unit | None, list[_Sent]] = {}
        self.copied_bytes = 0

    def send(self, host: HostTensor, gradient: Tensor) -> tuple[Tensor, Any]:
        """Begin to copy a gradient; the tensor that it will be, and the event from when on it is.

        Args:
            host: the parameter that it is of.
            gradient: on the device, of the parameter's shape and dtype.

        Returns:
            The tensor on the host, and None for one that is there already, such as a sparse one.
        """
        if not is_plain(gradient) or host.unit is None:
            with aside():
                return gradient.to("cpu"), None
        self._let_others_arrive(host.unit)
        stream = self._link.current()
        there = self._memory.take(host)
        with aside():
            if gradient.stride() != there.stride():
                # A copy that also reorders would stop the host.
                form = gradient.size(), there.stride()
                gradient = gradient.new_empty_strided(*form).copy_(gradient)
            # Synchronization strategy: the kernels that compute it run on this stream.
            event = self._link.page_out([(there, gradient)], [self._link.mark(stream)])
        self.copied_bytes += gradient.nbytes
        self._under_way.setdefault(host.unit, []).append(_Sent(gradient, stream, event))
        return there, event

    def wait(self, event: Any) -> None:
        """Stop the host until a copy is over."""
        # Synchronization strategy: from here on hooks, sums and optimizers read the host's bytes.
        self._link.let_host(event)

    def end(self) -> None:
        """No more will be sent for now."""
        while self._under_way:
            self._let_arrive(next(iter(self._under_way)))

    @property
    def host_bytes(self) -> int:
        """The host memory that gradients lie in."""
        return self._memory.n_bytes

    def named_tensors(self) -> Iterator[NamedTensor]:
        """The host memory that gradients lie in."""
        yield from self._memory.named_tensors()

    def close(self) -> None:
        """Let go of it all; gradients that are in use keep their memory."""
        self._under_way.clear()
        self._memory.close()

    def _let_others_arrive(self, unit: Unit) -> None:
        if unit not in self._under_way:
            while len(self._under_way) >= MOST_UNITS:
                self._let_arrive(next(iter(self._under_way)))

    def _let_arrive(self, unit: Unit | None) -> None:
        """Give the memory of a unit's gradients back to the streams that they were computed on."""
        # Synchronization strategy: who gets this memory next writes it on the same stream, after
        # the wait for the copy that reads it. The host does not wait: it would launch nothing then.
        # Kept until then, or another thread could get this memory before the wait.
        under_way = self._under_way.pop(unit)
        last = {sent.stream.stream_id: sent for sent in under_way}
        for sent in last.values():
            self._meter.note_stall(self._link.let_compute(sent.stream, sent.event))
