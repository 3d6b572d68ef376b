"""The memory that a paged model takes, on the device and on the host.

Invariant: all of it is taken, or none; and it is given back once, by whoever comes first.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import nn

from tenure._cuda_blocks import CachedMemory, taken_by
from tenure._registries import NamedTensor, namers

from ._device import Engine
from ._host import FileStore, HostBuffers, HostStore, SpillStore, checked_folder
from ._link import FileLink, Link
from ._model import Unit
from ._planning import Planned
from ._sharing import Share


class Resources:
    """What was taken, and whom it serves.

    Args:
        engine: the pages.
        store: the host bytes.
        units: all units of the plan; what else refers to them does so weakly.

    Attributes:
        closed: whether it is given back.
    """

    def __init__(self, engine: Engine, store: HostStore, units: list[Unit]) -> None:
        self.engine, self.store, self.units = engine, store, units
        self.closed = False
        self._model: weakref.ref[nn.Module] | None = None

    @property
    def taken(self) -> CachedMemory:
        """What all of it takes of the device now."""
        return taken_by(self.engine.room.slab_sizes, self.engine.device)

    def serve(self, model: nn.Module) -> None:
        """Be named in reports of memory as the model's, from now until it is given back."""
        self._model = weakref.ref(model)
        namers.add(self)

    def served_model(self) -> nn.Module | None:
        """See `TensorNamer`."""
        return None if self._model is None else self._model()

    def named_tensors(self) -> Iterator[NamedTensor]:
        """See `TensorNamer`."""
        for keeper in (self.engine, self.store):
            yield from keeper.named_tensors()

    def close(self) -> None:
        """Let go of the device, and of what the host needed."""
        if not self.closed:
            self.closed = True
            namers.discard(self)
            self.engine.close()
            self.store.close()


def acquire(
    planned: Planned,
    engine: Engine,
    link: Link,
    store: HostStore,
    units: list[Unit],
    share: Share | None = None,
) -> Resources:
    """Take the memory that a plan needs: the device's first, for that may fail, then the host's.

    Args:
        planned: the plan.
        engine: the pages.
        link: to where the model computes.
        store: where the host's bytes are to be.
        units: those that the store adopts.
        share: of a budget that changes.

    Raises:
        PagingError: files can't be written or read; nothing is taken.
        torch.OutOfMemoryError: the device has no room; nothing is taken.
    """
    with ExitStack() as undoing:
        undoing.callback(store.close)
        undoing.callback(link.close)
        # The device first, for that is what may fail; to move weights on the host takes long.
        arrangement = planned.arrangement
        plan = planned.plan
        all_bytes = plan.budget_bytes if share is None else plan.allocated_bytes
        beside_bytes = all_bytes - sum(arrangement.sizes)
        reserved = engine.room.reserve(arrangement, planned.kept, beside_bytes)
        if share is not None:
            share.serve(engine, beside_bytes)
        resources = Resources(engine, store, planned.cut.units)
        undoing.callback(resources.close)
        store.adopt(units)
        # In the order of the model: so they are used, and so reports list them.
        stay = [unit for unit in planned.cut.units if unit in reserved]
        engine.fill_residents({unit: reserved[unit] for unit in stay})
        undoing.pop_all()
    return resources


def ways_to(device: torch.device, host: str | Path, planned: Planned) -> tuple[Link, HostStore]:
    """How weights get to a device, and where they are meanwhile."""
    if isinstance(host, Path):
        files = SpillStore(checked_folder(host), planned.plan.model)
        return file_link(planned, device, files), files
    link = Link(device)
    advice = '; or say host="pageable"'
    return link, HostBuffers(device, pin=host == "pinned", advice=advice)


def file_link(planned: Planned, device: torch.device, store: FileStore) -> Link:
    """The link from a store's files to a device, or to where the CPU computes."""
    largest_bytes = max((unit.n_bytes for unit in planned.cut.units), default=1)
    return FileLink(device, store.reader, largest_bytes)
