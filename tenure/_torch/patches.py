"""Changes to torch's classes that last while somebody needs them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any


class Patch:
    """A change that is made for the first who needs it, and undone after the last.

    Args:
        make: makes the change.
        undo: takes it back.
    """

    def __init__(self, make: Callable[[], object], undo: Callable[[], object]) -> None:
        self._make, self._undo = make, undo
        # reentrant: an owner may go wherever memory is collected, here as well
        self._lock = threading.RLock()
        self._n_owners = 0

    def last_while(self, owner: object) -> weakref.finalize[[], object]:
        """Have it last until what is returned is called, or its owner is gone."""
        with self._lock:
            if not self._n_owners:
                self._make()
            self._n_owners += 1
        return weakref.finalize(owner, self._end)

    def _end(self) -> None:
        with self._lock:
            self._n_owners -= 1
            if not self._n_owners:
                self._undo()


def patch_of_class(kind: type, wrappers: Mapping[str, Callable[[Any], Any]]) -> Patch:
    """Return a patch of attributes of a class; undone, an inherited one is inherited again.

    Args:
        kind: the class.
        wrappers: for the name of each attribute what makes the new one of the one that is there.
    """
    own: dict[str, Any] = {}

    def make() -> None:
        for name, wrapper in wrappers.items():
            # None if it is inherited
            own[name] = vars(kind).get(name)
            setattr(kind, name, wrapper(getattr(kind, name)))

    def undo() -> None:
        for name, before in own.items():
            if before is None:
                delattr(kind, name)
            else:
                setattr(kind, name, before)

    return Patch(make, undo)


def works() -> bool:
    """Whether the first makes the change and the last undoes it."""
    seen: list[str] = []
    patch = Patch(lambda: seen.append("made"), lambda: seen.append("undone"))
    owners = [threading.Event(), threading.Event()]
    ends = [patch.last_while(owner) for owner in owners]
    ends[0]()
    seen.append("one is left")
    owners.clear()
    return seen == ["made", "one is left", "undone"]
