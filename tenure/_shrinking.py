"""Who can give device memory back when someone else runs out of it: pagers, caches.

Invariant: being registered keeps nothing alive, and asking never raises for one of those asked.
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import Protocol, runtime_checkable

_logger = logging.getLogger("tenure")


@runtime_checkable
class Shrinkable(Protocol):
    """What holds device memory that it can do without, at a price."""

    def shrink(self, device: str | None, n_bytes: int | None) -> int:
        """Give back device memory, if possible at once as much as is wanted.

        Called on the thread that ran out of memory, outside of any operation.

        Args:
            device: where memory is short, as torch spells it; ``"cuda"`` where the index is not
                known, None where the device is not.
            n_bytes: bytes that would help; None where that is not known.

        Returns:
            The bytes given back on that device; 0 when there is nothing left to give, and from
            then on.
        """
        ...


_lock = threading.Lock()
_registered: weakref.WeakSet[Shrinkable] = weakref.WeakSet()


def register_shrinkable(shrinkable: Shrinkable) -> None:
    """From now on, and as long as it lives, ask this one when memory is short."""
    with _lock:
        _registered.add(shrinkable)


def unregister_shrinkable(shrinkable: Shrinkable) -> None:
    """Ask it no more; one that is not registered is ignored."""
    with _lock:
        _registered.discard(shrinkable)


def ask_to_shrink(device: str | None, n_bytes: int | None) -> int:
    """Ask one after the other until ``n_bytes`` have been given back.

    Returns:
        The bytes given back in all.
    """
    with _lock:
        asked = list(_registered)
    given_bytes = 0
    for shrinkable in asked:
        if n_bytes is not None and given_bytes >= n_bytes:
            break
        wanted_bytes = None if n_bytes is None else n_bytes - given_bytes
        given_bytes += _ask(shrinkable, device, wanted_bytes)
    return given_bytes


def _ask(shrinkable: Shrinkable, device: str | None, n_bytes: int | None) -> int:
    try:
        return max(0, shrinkable.shrink(device, n_bytes))
    except Exception:  # the one that asks has an error of its own to handle
        _logger.warning("%r could not give memory back.", shrinkable, exc_info=True)
        return 0
