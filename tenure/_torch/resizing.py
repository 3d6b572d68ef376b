"""Storages that are given another size by no operation, so no mode sees it: who wants is told."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from torch import UntypedStorage

from .patches import Patch

Told = Callable[[UntypedStorage, int], None]
"""Called with a storage and its new size in bytes, before it has that; what it raises, prevents
it."""


def tell(told: Told) -> None:
    """Call a function before this thread gives a storage another size, until `tell_no_more`."""
    _listening[told] = threading.get_ident(), _resizing.last_while(told)


def tell_no_more(told: Told) -> None:
    """End that; nothing where it was not begun."""
    if told in _listening:
        _, end = _listening.pop(told)
        end()


def _telling(resize: Any) -> Any:
    def tell_and_resize(storage: UntypedStorage, size: Any) -> Any:
        if _resizing.is_current("resize_", tell_and_resize):
            here = threading.get_ident()
            for told, (thread, _) in [*_listening.items()]:
                if thread == here:
                    told(storage, int(size))
        return resize(storage, size)

    return tell_and_resize


_listening: dict[Told, tuple[int, weakref.finalize[[], object]]] = {}
_resizing = Patch(UntypedStorage, {"resize_": _telling})
