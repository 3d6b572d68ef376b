"""What was learned, site by site, in this process; and as a file, for the next one.

Invariant: nothing here holds a function, its closure or its arguments: a site refers weakly to the
objects that it is about, and is gone with them.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ._call_signature import modes_in
from ._record import SizeRecord

_MOST_SITES = 4096
_MOST_SIGNATURES = 64

SiteKey = tuple[object, ...]
"""Hashable parts; classes and identities among them."""


@dataclass(slots=True)
class Site:
    """One function, call or context, and its records by signature, the latest last.

    Attributes:
        name: the same in each process, for files; "" where there is no such name.
        about: the objects whose identities are in the key of the site.
        records: what is known.
    """

    name: str
    about: tuple[weakref.ref[object], ...] = ()
    records: dict[str, SizeRecord] = field(default_factory=dict)

    @property
    def is_alive(self) -> bool:
        """Whether what it is about is still there; an identity may be used again later."""
        return all(reference() is not None for reference in self.about)

    def known(self, signature: str) -> SizeRecord | None:
        """The record of a signature; without one a copy of the latest under the same modes."""
        with _lock:
            record = self.records.pop(signature, None)
            if record is None:
                modes = modes_in(signature)
                similar = (name for name in reversed(self.records) if modes_in(name) == modes)
                name = next(similar, None)
                if name is None:
                    return None
                record = self.records[name].copy()
            self.records[signature] = record  # as the latest
            _shorten(self.records, _MOST_SIGNATURES)
            return record

    def new(self, signature: str) -> SizeRecord:
        """The record of a signature, empty where there is none."""
        with _lock:
            record = self.records.setdefault(signature, SizeRecord())
            _shorten(self.records, _MOST_SIGNATURES)
            return record


_lock = threading.RLock()
sites: OrderedDict[SiteKey, Site] = OrderedDict()
from_files: dict[str, dict[str, SizeRecord]] = {}
"""What was loaded; where there is something, sites not seen yet are looked up by name."""


def find(key: SiteKey) -> Site | None:
    """The site of a key, if something is known there."""
    site = sites.get(key)
    if site is None or not site.is_alive:
        return None
    with _lock:
        if key in sites:  # another thread may forget
            sites.move_to_end(key)  # in one step: a thread that looks meanwhile finds it
    return site


def add(key: SiteKey, name: str, about: Iterable[object]) -> Site:
    """The site of a key, with what a file told of it."""
    with _lock:  # two threads that are the first here get the same one
        site = find(key)
        if site is None:
            references = tuple(weakref.ref(each) for each in about)
            known = {each: record.copy() for each, record in from_files.get(name, {}).items()}
            site = sites[key] = Site(name, references, known)
            _shorten(sites, _MOST_SITES)
    return site


def reset() -> None:
    """Forget all sizes that were learned or loaded, on all threads; calls that run go on.

    Example:
        >>> from tenure import adaptive
        >>> adaptive.reset()
    """
    with _lock:
        sites.clear()
        from_files.clear()


def entries() -> dict[tuple[str, str], SizeRecord]:
    """What is known now, by the name of a site and a signature; of two the one of smaller sizes."""
    found: dict[tuple[str, str], SizeRecord] = {}
    with _lock:
        for site in sites.values():
            for signature, shared in site.records.items():
                record = shared.snapshot()
                earlier = found.get((site.name, signature))
                if site.name and (earlier is None or record.ok < earlier.ok):
                    found[site.name, signature] = record
        for name, records in from_files.items():
            for signature, record in records.items():
                found.setdefault((name, signature), record)
    return found


def take(loaded: dict[tuple[str, str], SizeRecord]) -> None:
    """Know what a file told, instead of what was known of the same sites and signatures."""
    with _lock:
        for (name, signature), record in loaded.items():
            from_files.setdefault(name, {})[signature] = record
        for site in sites.values():
            if records := from_files.get(site.name):
                site.records |= {each: record.copy() for each, record in records.items()}


def _shorten(entries: dict[Any, Any], most: int) -> None:
    """Let go of the entries that were not used for longest."""
    while len(entries) > most:
        del entries[next(iter(entries))]
