"""The pages of a model that is trained: weights change between passes, and gradients go home.

Invariant: from the end of a backward pass to the begin of the next forward no copy reads the host's
weights, so that whoever steps them, through whatever reference, races with none.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from tenure._registries import NamedTensor
from tenure._torch.optimizers import bring_scale_home, wait_while

from .._device import Engine, Pass
from .._host import HostStore
from .._link import Link
from .._model import Unit
from ._activations import ACTIVATIONS, LEAST_BYTES, Activations
from ._homeward import GRADIENTS, Homeward
from ._host_slabs import HostSlabs


class TrainingEngine(Engine):
    """Do as an engine does.

    Args:
        link: the streams of the device.
        store: the host bytes.
        units: as of an engine.
        max_ahead: as of an engine.
        make: makes host memory for gradients and activations, of so many bytes.
        moves_activations: whether what graphs save beside weights goes to the host.

    Attributes:
        homeward: takes gradients to the host.
        activations: takes what graphs save beside weights there; None where that stays.
    """

    trains = True

    def __init__(
        self,
        link: Link,
        store: HostStore,
        units: list[Unit],
        max_ahead: int | None,
        make: Callable[[int], Any],
        *,
        moves_activations: bool = False,
    ) -> None:
        super().__init__(link, store, units, max_ahead)
        # Of gradients, and of activations
        self._slabs = HostSlabs(make, GRADIENTS), HostSlabs(make, ACTIVATIONS, LEAST_BYTES)
        self.homeward = Homeward(link, self._slabs[0])
        self.activations: Activations | None = None
        if moves_activations:
            self.activations = Activations(link, self._slabs[1])
        self._end_watching = _before_steps(self)
        self._end_waiting = wait_while(self)

    @property
    def host_bytes(self) -> int:
        """Host memory that holds the weights, their gradients, and activations that are away."""
        return super().host_bytes + sum(slabs.n_bytes for slabs in self._slabs)

    def begin(self, now: Pass) -> None:
        """Do as an engine does."""
        self.room.written_in_graphs.clear()
        super().begin(now)

    def end(self) -> None:
        """End a pass as an engine does; fetch nothing if no backward pass follows."""
        super().end()
        for page in self.room.pages.values():
            self.room.written_in_graphs += page.end_aliases()
        if not self._now.records:
            self.homeward.end()
            self._copies.wait_for_all_copies()

    def wait_for_step(self, optimizer: Optimizer) -> None:
        """Stop the host until no copy reads what an optimizer is to write, and its scale is here.

        A forward that no backward pass follows has fetched for one.
        """
        self._copies.wait_for_all_copies()
        bring_scale_home(optimizer)

    def close(self) -> None:
        """Do as an engine does."""
        self._end_watching()
        self._end_waiting()
        super().close()
        self.homeward.close()
        if self.activations is not None:
            self.activations.close()
        for slabs in self._slabs:
            slabs.close()

    def named_tensors(self) -> Iterator[NamedTensor]:
        """Yield the tensors of an engine, and the host memory for gradients and activations."""
        yield from super().named_tensors()
        for slabs in self._slabs:
            yield from slabs.named_tensors()


def _before_steps(engine: TrainingEngine) -> Callable[[], object]:
    """Have optimizers wait as of ``wait_for_step``; what ends that."""
    known = weakref.WeakMethod(engine.wait_for_step)

    def wait(optimizer: Optimizer, *_: object) -> None:
        wait_for_step = known()
        if wait_for_step is not None:
            wait_for_step(optimizer)

    return weakref.finalize(engine, register_optimizer_step_pre_hook(wait).remove)
