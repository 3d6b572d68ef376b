"""What a process holds before and after: memory, objects of Python, entries of scopes.

By private names, because no public one counts what a thread's scopes keep of tensors that are gone.
"""

import ctypes
import gc
import sys
from collections import Counter
from typing import NamedTuple

import psutil

from tenure.scopes._ledger import prune
from tenure.scopes._thread import this_thread

# loaded once, because each load leaves a class that is garbage until it is collected
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


class Held(NamedTuple):
    """What the process holds at a moment, or more than at another one."""

    rss_bytes: int
    kinds: Counter[type]
    entries: int

    @property
    def objects(self):
        """How many objects of Python, of all types."""
        return sum(self.kinds.values())

    @property
    def types(self):
        """How many of each type, as text."""
        return ", ".join(f"{n:+} {kind.__qualname__}" for kind, n in self.kinds.items())

    def since(self, before):
        more = {kind: self.kinds[kind] - before.kinds[kind] for kind in self.kinds | before.kinds}
        kinds = Counter({kind: n for kind, n in more.items() if n})
        return Held(self.rss_bytes - before.rss_bytes, kinds, self.entries - before.entries)


def held():
    """Count, when garbage is gone and free memory was given back."""
    scopes = this_thread()
    # dead ones wait in there until they are 64: how many there are now says nothing
    prune(scopes.handed_out)
    prune(scopes.chosen)
    gc.collect()
    if _LIBC is not None:
        _LIBC.malloc_trim(0)
    entries = len(scopes.handed_out) + len(scopes.chosen) + scopes.n_owned() + len(scopes.open)
    rss_bytes = psutil.Process().memory_info().rss
    return Held(rss_bytes, Counter(map(type, gc.get_objects())), entries)


def grown(run, n_runs, n_warm, forget=gc.collect):
    """How much more is held after ``n_runs`` of ``run(i)`` than after the first ``n_warm``.

    ``forget`` lets go of what is to be remembered, before each count.
    """
    for i in range(n_warm):
        run(i)
    # what counting leaves, the first count among it, is there before it counts
    forget()
    before = held()
    before = held()
    for i in range(n_warm, n_runs):
        run(i)
    forget()
    return held().since(before)
