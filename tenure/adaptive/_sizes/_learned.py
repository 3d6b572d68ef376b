"""What was learned, site by site, in this process; and as a file, for the next one.

Invariant: nothing here holds a function, its closure or its arguments: a site refers weakly to the
objects that it is about, and is gone with them. A file that can't be read whole changes nothing,
and a write that fails leaves the file that was there. Equal signatures in two processes mean equal
circumstances; the size of the dimension that is split is no part of them.
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tenure._errors import AdaptiveUsageError
from tenure._report_files import write_whole
from tenure._text import describe_elements, dtype_name, shape_of
from tenure._torch.quiet import without_functions

from ._model import SizeModel

_FORMAT = "tenure.adaptive sizes"
_VERSION = 1
# A program that makes functions, or shapes, without end is not to fill the memory with records.
_MOST_SITES = 4096
_MOST_SIGNATURES = 64

_Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]
SiteKey = tuple[object, ...]
"""Hashable parts; classes and identities among them."""


@dataclass(slots=True)
class SizeSite:
    """One function, call or context, and its records by signature, the latest last.

    Attributes:
        name: the same in each process, for files; "" where there is no such name.
        about: the objects whose identities are in the key of the site.
        records: what is known.
    """

    name: str
    about: tuple[weakref.ref[object], ...] = ()
    records: dict[str, SizeModel] = field(default_factory=dict)

    @property
    def is_alive(self) -> bool:
        """Whether what it is about is still there; an identity may be used again later."""
        return all(reference() is not None for reference in self.about)

    def known(self, signature: str) -> SizeModel | None:
        """Return the record of a signature, else a copy of the latest under the same modes."""
        with _lock:
            record = self.records.pop(signature, None) or self._similar(signature)
            if record is not None:
                # as the latest: the oldest are forgotten first
                self.records[signature] = record
                _shorten(self.records, _MOST_SIGNATURES)
            return record

    def _similar(self, signature: str) -> SizeModel | None:
        """Return a copy of the latest record of another shape, as a first guess.

        Not of other modes: without gradients far larger ones fit.
        """
        modes, adds = circumstances_in(signature)
        for wanted in ((modes, adds), (modes, not adds)):
            for name in reversed(self.records):
                if circumstances_in(name) == wanted:
                    is_fewer = adds and wanted != (modes, adds)
                    return self.records[name].for_other_work(has_less_room=is_fewer)
        return None

    def new(self, signature: str) -> SizeModel:
        """Return the record of a signature, empty where there is none."""
        with _lock:
            record = self.records.setdefault(signature, SizeModel())
            _shorten(self.records, _MOST_SIGNATURES)
            return record


_lock = threading.RLock()
sites: dict[SiteKey, SizeSite] = {}
from_files: dict[str, dict[str, SizeModel]] = {}
"""What was loaded; where there is something, sites not seen yet are looked up by name."""


def find(key: SiteKey) -> SizeSite | None:
    """Return the site of a key, if something is known there."""
    site = sites.get(key)
    # one whose objects are gone is another's by now, though the identities are the same: add() puts
    # a new one in its place
    return site if site is not None and site.is_alive else None


def add(key: SiteKey, name: str, about: Iterable[object]) -> SizeSite:
    """Return the site of a key, with what a file told of it."""
    # two threads that are the first here get the same one
    with _lock:
        site = find(key)
        if site is None:
            references = tuple(weakref.ref(each) for each in about)
            # copies: what is learned here is not what the file said, which other sites begin with
            known = {
                each: record.for_other_work() for each, record in from_files.get(name, {}).items()
            }
            site = sites[key] = SizeSite(name, references, known)
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


def _shorten(entries: dict[Any, Any], most: int) -> None:
    """Drop the first entries."""
    while len(entries) > most:
        del entries[next(iter(entries))]


# --- files


def save(path: _Path) -> None:
    """Write the sizes that were learned as JSON, for `load` in another process.

    A size belongs to a function, named by its module and name, or to a call, named by the file's
    name without folders, the function that calls, and the line within that; or to a ``context``,
    if that is a str, a number, or a tuple of those.

    Args:
        path: the file; one that is there is replaced, and one that a link points to as well.

    Raises:
        AdaptiveUsageError: it can't be written, or is no regular file.
    """
    file = _checked_path("save", path)
    found = _entries()
    sizes = [
        {
            "site": name,
            "signature": signature,
            "ok": each.ok,
            "bad": each.bad,
            "device": each.device,
        }
        for (name, signature), each in sorted(found.items(), key=lambda item: item[0])
        if each.ok or each.bad is not None
    ]
    content = {"format": _FORMAT, "version": _VERSION, "sizes": sizes}
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    try:
        # names may have halves of characters: written as JSON spells them, they can be read again
        write_whole(_target_of(file), text.encode("utf-8", "backslashreplace"))
    # a path with a null character is a ValueError
    except (OSError, ValueError) as error:
        raise AdaptiveUsageError(f"save() can't write {str(file)!r}: {error}.") from error


def load(path: _Path) -> None:
    """Begin with the sizes that `save` wrote, instead of those learned for the same sites.

    Args:
        path: the file.

    Raises:
        AdaptiveUsageError: it can't be read, or `save` did not write it. Nothing was changed.
    """
    file = _checked_path("load", path)
    try:
        content = json.loads(file.read_text("utf-8"))
        loaded = dict(map(_entry, _checked_sizes(content)))
    except (OSError, ValueError, RecursionError) as error:
        raise AdaptiveUsageError(
            f"load() can't use {str(file)!r}: {error}. Nothing was changed. Give it a file that "
            "save() wrote."
        ) from error
    with _lock:
        for (name, signature), record in loaded.items():
            from_files.setdefault(name, {})[signature] = record
        for site in sites.values():
            if records := from_files.get(site.name):
                site.records |= {each: known.for_other_work() for each, known in records.items()}


def _checked_path(entry: str, path: _Path) -> Path:
    try:
        return Path(os.fsdecode(path))
    except TypeError:
        raise AdaptiveUsageError(
            f"{entry}() got {path!r}, which names no file. Give it a path, as str, bytes or Path."
        ) from None


def _target_of(path: Path) -> Path:
    """Return the file that is replaced: what a link points to, and nothing that is no file.

    Raises:
        OSError: a folder, a device or a pipe is there, or a link to itself.
    """
    target = Path(os.path.realpath(path))
    if os.path.lexists(target) and not target.is_file():
        raise OSError("it is no regular file")
    return target


def _checked_sizes(content: Any) -> list[Any]:
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError(f"it does not say that it holds {_FORMAT!r}")
    if content.get("version") != _VERSION:
        raise ValueError(f"its version is {content.get('version')!r}, and not {_VERSION}")
    if not isinstance(content.get("sizes"), list):
        raise ValueError("it has no list of sizes")
    sizes: list[Any] = content["sizes"]
    return sizes


def _entry(item: Any) -> tuple[tuple[str, str], SizeModel]:
    match item:
        case {
            "site": str(site),
            "signature": str(signature),
            "ok": int(ok),
            "bad": (int() | None) as bad,
            "device": (str() | None) as device,
        } if ok >= 0 and (bad is None or ok < bad):
            return (site, signature), SizeModel(ok, bad, device=device)
    raise ValueError(f"one of its sizes is {item!r:.200}")


def _entries() -> dict[tuple[str, str], SizeModel]:
    """Return the known records by site and signature; of two, the one of smaller sizes."""
    found: dict[tuple[str, str], SizeModel] = {}
    with _lock:
        for site in sites.values():
            for signature, shared in site.records.items():
                record = shared.snapshot()
                earlier = found.get((site.name, signature))
                # two sites of one name, as of a function that is defined twice: the smaller size is
                # safe for both
                if site.name and (earlier is None or record.ok < earlier.ok):
                    found[site.name, signature] = record
        for name, records in from_files.items():
            for signature, record in records.items():
                found.setdefault((name, signature), record)
    return found


# --- what else decides how much memory a size needs: the modes of torch, and the arguments

_SEPARATOR = " | "
_ADDING = ", adding gradients"


def signature_of(
    args: Iterable[object],
    kwargs: Mapping[str, object],
    chunked: Tensor | None = None,
    dimension: int = 0,
    *,
    adds_gradients: bool = False,
) -> str:
    """Spell the circumstances of a call.

    Args:
        args: what is passed on by position; tensors count with dtype, device and shape without the
            first dimension, modules with their mode of training, other things not at all.
        kwargs: what is passed on by name.
        chunked: the tensor of any shape that is split.
        dimension: the dimension of ``chunked`` that is split.
        adds_gradients: whether gradients of before stand beside those that the call makes.

    Example:
        >>> signature_of((torch.ones(8, 3), "other"), {})
        'grad | float32[*, 3] on cpu'
    """
    parts = [_spelled(chunked, dimension)] if chunked is not None else []
    parts += [spelled for value in args if (spelled := _spelled(value))]
    parts += [f"{key}={spelled}" for key, value in kwargs.items() if (spelled := _spelled(value))]
    return _SEPARATOR.join([_modes() + _ADDING * adds_gradients, *parts])


def circumstances_in(signature: str) -> tuple[str, bool]:
    """Return the modes in a signature, and whether gradients of before are there."""
    modes = signature.partition(_SEPARATOR)[0]
    return modes.removesuffix(_ADDING), modes.endswith(_ADDING)


def _modes() -> str:
    grad = "inference" if torch.is_inference_mode_enabled() else "no grad"
    modes = ["grad" if torch.is_grad_enabled() else grad]
    accelerator = torch.accelerator.current_accelerator()
    # autocast of both counts: work on a device often has parts on the host
    kinds = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    for kind in kinds:
        if torch.is_autocast_enabled(kind):
            dtype = dtype_name(torch.get_autocast_dtype(kind))
            modes.append(f"autocast {kind} {dtype}")
    return ", ".join(modes)


def _spelled(value: object, dimension: int = 0) -> str:
    if isinstance(value, nn.Module):
        return f"{type(value).__name__} in {'training' if value.training else 'evaluation'}"
    # numbers and texts don't count: they differ from call to call where the memory does not
    if not isinstance(value, Tensor):
        return ""
    with without_functions():
        # rows of different lengths have a size of their own in each batch, which is no number
        sizes = [str(n) if isinstance(n, int) else "ragged" for n in shape_of(value)]
        sizes[dimension : dimension + 1] = ["*"] * bool(sizes)
        return f"{describe_elements(value.dtype, sizes)} on {value.device}"
