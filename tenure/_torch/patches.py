"""Changes to attributes of classes and modules, most of them torch's, that last while needed.

Rules: (1) Whoever needs a patch says so each time; if another patcher has restored what it saw
before ours, the patch is made again. (2) What stood there is put back exactly, unless another
patcher stands above: then ours stays below and only calls on. (3) A change of a class costs: Python
forgets what it knows of the attributes of its subclasses, and from Python 3.13 on it gives up on a
class after a thousand changes (``MAX_VERSIONS_PER_CLASS`` in Objects/typeobject.c). So a patch that
many short blocks need lingers, until it was called often while nobody needed it; then twice as
often. (4) Nothing of this hangs on garbage collections: an error in what these call, also one of
Ctrl-C, is lost.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from . import optional

_MOST_UNNEEDED = 1000
_MARK = "_tenure_patch"


class Patch:
    """Attributes that are replaced while somebody needs it.

    Args:
        target: a class or module, or its name from ``torch`` on; nothing is patched where torch has
            no such thing.
        wrappers: for the name of each attribute what makes the new one of the one that is there.
        lingers: whether it stays for a while; see rule 3. Its wrappers call ``was_called``.

    Attributes:
        replaced: by name what the target itself had, None if it was inherited, and what replaced
            it; a wrapper that is not there was left below another patcher's.
    """

    def __init__(
        self, target: Any, wrappers: Mapping[str, Callable[[Any], Any]], *, lingers: bool = False
    ) -> None:
        self._wanted, self._wrappers, self._lingers = target, wrappers, lingers
        self._target: Any = None
        # reentrant: an owner may go wherever memory is collected, here as well
        self._lock = threading.RLock()
        self._n_owners = self._n_unneeded = 0
        self._most_unneeded = _MOST_UNNEEDED
        self.replaced: dict[str, tuple[Any, Any]] = {}

    def last_while(self, owner: object) -> weakref.finalize[[], object]:
        """Have it last until what is returned is called, or its owner is gone."""
        self.begin()
        return weakref.finalize(owner, self.end)

    @contextmanager
    def block(self) -> Iterator[None]:
        """Return a block in which it lasts."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def need(self) -> bool:
        """Make it unless it stands, and if it lingers let it stay; return whether it stood."""
        has_stood = True
        with self._lock:
            self._n_unneeded, wanted = 0, self._wanted
            target = self._target = optional(wanted) if isinstance(wanted, str) else wanted
            for name, wrapper in self._wrappers.items():
                own = getattr(target, "__dict__", {}).get(name)
                owner, *replaced = getattr(own, _MARK, (None,))
                if owner is self:
                    # ours, which another patcher has put back, or that of functools.wraps over it
                    self.replaced[name] = replaced[0], replaced[1]
                elif not (own is not None and self.is_current(name, own)) and hasattr(target, name):
                    has_stood = False
                    made = wrapper(getattr(target, name))
                    if isinstance(made, FunctionType):
                        # functools.wraps, with which torch.fx wraps it, copies the mark
                        vars(made)[_MARK] = self, own, made
                    self.replaced[name] = own, made
                    setattr(target, name, made)
        return has_stood

    def was_called(self) -> None:
        """Note a call of one that lingers; after many that nobody needed it is undone."""
        self._n_unneeded += 1
        if self._n_unneeded <= self._most_unneeded or self._n_owners:
            return
        with self._lock:
            if not self._n_owners:
                self._most_unneeded *= 2
                self._undo()

    def is_current(self, name: str, made: object) -> bool:
        """Return whether a wrapper is the outermost, not left below another patcher's."""
        replaced = self.replaced.get(name)
        return replaced is not None and replaced[1] is made

    def begin(self) -> None:
        """Have it last from here on; each call is followed by one of `end`."""
        with self._lock:
            self._n_owners += 1
            self.need()

    def end(self) -> None:
        """Need it no longer."""
        with self._lock:
            self._n_owners -= 1
            if not (self._n_owners or self._lingers):
                self._undo()

    def _undo(self) -> None:
        target = self._target
        for name, (own, made) in self.replaced.items():
            if vars(target).get(name) is not made:
                continue
            # the mark makes a cycle, which would be garbage after each block
            if isinstance(made, FunctionType):
                vars(made).pop(_MARK, None)
            if own is None:
                delattr(target, name)
            else:
                setattr(target, name, own)
        self.replaced.clear()
