"""Storages that are given another size by no operation, which no mode sees: who wants is told.

Invariant: while nobody listens, the method that stood there stands there again; who has put another
one in its place meanwhile, such as the simulated accelerator, keeps it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import UntypedStorage

Told = Callable[[UntypedStorage, int], None]
"""Called with a storage and its new size in bytes, before it has that; what it raises, prevents
it."""
_lock = threading.Lock()
_listening: list[tuple[int, Told]] = []
_class: Any = UntypedStorage
_before: Any = _class.resize_
_was_own = False
"""Whether the class has had one of its own, and did not inherit it."""
_stands = False
"""Whether ours stands there, or below one that was put over it."""


def tell(told: Told) -> None:
    """Call a function before this thread gives a storage another size, until `tell_no_more`."""
    global _before, _was_own, _stands
    with _lock:
        _listening.append((threading.get_ident(), told))
        # twice in one chain would call itself for ever
        if not _stands:
            _before, _was_own = _class.resize_, "resize_" in vars(_class)
            _class.resize_, _stands = _resize_and_tell, True


def tell_no_more(told: Told) -> None:
    """End that; nothing where it was not begun."""
    global _stands
    with _lock:
        # by equality: a bound method is another object each time
        _listening[:] = [each for each in _listening if each[1] != told]
        if not _listening and _class.resize_ is _resize_and_tell:
            if _was_own:
                _class.resize_ = _before
            else:
                del _class.resize_
            _stands = False


@contextmanager
def resizes_told(told: Told) -> Iterator[None]:
    """A block in which a function is called."""
    tell(told)
    try:
        yield
    finally:
        tell_no_more(told)


def _resize_and_tell(storage: UntypedStorage, size: Any) -> Any:
    here = threading.get_ident()
    for thread, told in [*_listening]:
        if thread == here:
            told(storage, int(size))
    return _before(storage, size)


def works() -> bool:
    """Whether a resize is seen, and torch's own method is back after it."""
    seen: list[int] = []
    method = _class.resize_
    with resizes_told(lambda storage, n_bytes: seen.append(storage.nbytes() - n_bytes)):
        UntypedStorage(8).resize_(2)
    return seen == [6] and _class.resize_ is method
