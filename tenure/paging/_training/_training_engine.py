"""The pages of a model that is trained: weights change between passes, and gradients go home.

Invariant: from the end of a backward pass to the begin of the next forward no copy reads the host's
weights, so that whoever steps them, through whatever reference, races with none.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from tenure._registries import NamedTensor
from tenure._torch.optimizers import bring_scale_home, wait_while
from tenure._torch.writes import set_version

from .._device import Copies, Engine, Page, Pass
from .._host import HostStore
from .._link import Link
from .._model import HostTensor, Unit
from ._activations import ActivationMemory, Activations
from ._gradient_memory import GradientMemory
from ._homeward import Homeward


def _before_steps(copies: Copies) -> Callable[[], object]:
    """Have optimizers wait until no copy reads what they are to write; what ends that.

    A forward that no backward pass follows has fetched for one. A scale that a fused optimizer is
    given is waited for as well.
    """
    known = weakref.ref(copies)

    def wait(optimizer: Optimizer, *_: object) -> None:
        there = known()
        if there is not None:
            _wait(there, optimizer)

    remove = register_optimizer_step_pre_hook(wait).remove
    return weakref.finalize(copies, remove)


def _wait(copies: Copies, optimizer: Optimizer) -> None:
    copies.wait_for_all_copies()
    bring_scale_home(optimizer)


class TrainingEngine(Engine):
    """Do as an engine does.

    Args:
        link: the streams of the device.
        store: the host bytes.
        max_ahead: how many units may be fetched ahead; None for as many as fit.
        make: makes host memory for gradients and activations, of so many bytes.
        moves_activations: whether what graphs save beside weights goes to the host.

    Attributes:
        homeward: takes gradients to the host.
        activations: takes what graphs save beside weights there; None where that stays.
    """

    def __init__(
        self,
        link: Link,
        store: HostStore,
        max_ahead: int | None,
        make: Callable[[int], Any],
        *,
        moves_activations: bool = False,
    ) -> None:
        super().__init__(link, store, max_ahead)
        self.homeward = Homeward(link, GradientMemory(make), self.meter)
        self.activations: Activations | None = None
        if moves_activations:
            self.activations = Activations(link, ActivationMemory(make), self.meter)
        self._end_watching = _before_steps(self._copies)
        self._end_waiting = wait_while(self)

    @property
    def host_bytes(self) -> int:
        """Host memory that holds the weights, their gradients, and activations that are away."""
        away_bytes = 0 if self.activations is None else self.activations.host_bytes
        return super().host_bytes + self.homeward.host_bytes + away_bytes

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
        """Stop the host until no copy reads what an optimizer is to write."""
        _wait(self._copies, optimizer)

    def release(self, page: Page) -> None:
        """Do as an engine does."""
        super().release(page)
        # Here, too, the next copy to it need not wait for all that was launched meanwhile.
        if page.is_resident and not page.users and not page.is_held():
            page.last_use = self._copies.marks_of(page)

    def close(self) -> None:
        """Do as an engine does."""
        self._end_watching()
        self._end_waiting()
        super().close()
        self.homeward.close()
        if self.activations is not None:
            self.activations.close()

    def named_tensors(self) -> Iterator[NamedTensor]:
        """Yield the tensors of an engine, and the host memory for gradients and activations."""
        yield from super().named_tensors()
        yield from self.homeward.named_tensors()
        if self.activations is not None:
            yield from self.activations.named_tensors()

    def _may_prepare(self) -> bool:
        """Do as an engine; also copy residents again that have changed on the host."""
        return True

    def _ahead(self, wanted: dict[Unit, None]) -> Iterable[Unit]:
        # What comes after the pass is not fetched: an optimizer is to write it.
        until = None if self._now.records else self._now.n_left
        return dict.fromkeys(islice(self._now.upcoming(), until))

    def _prepare(self, page: Page) -> None:
        """Copy anew, before it is used, what has changed on the host."""
        if not page.users:
            self.refresh(page)

    def _write_back(self, page: Page, changed: list[HostTensor]) -> None:
        # The copy to the host counts as a write there. A graph must see the writes of the program:
        # batch norm's, which its kernels make without a version, would refuse each backward pass.
        versions = [page.version_of(host) for host in changed]
        super()._write_back(page, changed)
        for host, version in zip(changed, versions, strict=True):
            set_version(host.tensor, version)
