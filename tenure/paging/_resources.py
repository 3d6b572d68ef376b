"""The memory that a paged model takes, on the device and on the host.

Invariant: all of it is taken, or none; and it is given back once, by whoever comes first.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch

from ._device import Engine
from ._host import FileStore, HostBuffers, HostStore, SpillStore, checked_folder
from ._link import FileLink, Link
from ._model import Unit
from ._planning import Planned
from ._sharing import Share


def acquire(
    planned: Planned,
    engine: Engine,
    link: Link,
    store: HostStore,
    units: list[Unit],
    share: Share | None = None,
) -> None:
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
        # What else is in the budget, for who names one
        spare_bytes = 0 if share else plan.budget_bytes - sum(arrangement.sizes)
        reserved = engine.room.reserve(arrangement, planned.kept, spare_bytes)
        if share is not None:
            share.serve(engine)
        engine.units = planned.cut.units
        undoing.callback(engine.close)
        store.adopt(units)
        # In the order of the model: so they are used, and so reports list them.
        stay = [unit for unit in planned.cut.units if unit in reserved]
        engine.fill_residents({unit: reserved[unit] for unit in stay})
        undoing.pop_all()


def ways_to(device: torch.device, host: str | Path, planned: Planned) -> tuple[Link, HostStore]:
    """Return how weights get to a device, and where they are meanwhile."""
    if isinstance(host, Path):
        files = SpillStore(checked_folder(host), planned.plan.model)
        return file_link(planned, device, files), files
    link = Link(device)
    advice = '; or say host="pageable"'
    return link, HostBuffers(device, pin=host == "pinned", advice=advice)


def file_link(planned: Planned, device: torch.device, store: FileStore) -> Link:
    """Return the link from a store's files to a device, or to where the CPU computes."""
    largest_bytes = max((unit.n_bytes for unit in planned.cut.units), default=1)
    return FileLink(device, store.reader, largest_bytes)
