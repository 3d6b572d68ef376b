"""Writing what was learned to a file, and reading it in another process.

Invariant: a file that can't be read whole changes nothing, and a write that fails leaves the file
that was there.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

from tenure._errors import AdaptiveUsageError

from . import _learned
from ._record import SizeRecord

_FORMAT = "tenure.adaptive sizes"
_VERSION = 1
_Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]


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
    found = _learned.entries()
    sizes = [
        {"site": name, "signature": signature, **_as_json(record)}
        for (name, signature), record in sorted(found.items(), key=lambda item: item[0])
        if record.ok or record.bad is not None
    ]
    content = {"format": _FORMAT, "version": _VERSION, "sizes": sizes}
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    try:
        _replace(_target_of(file), text)
    except (OSError, ValueError) as error:  # a path with a null character is a ValueError
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
    _learned.take(loaded)


def _checked_path(entry: str, path: _Path) -> Path:
    try:
        return Path(os.fsdecode(path))
    except TypeError:
        raise AdaptiveUsageError(
            f"{entry}() got {path!r}, which names no file. Give it a path, as str, bytes or Path."
        ) from None


def _target_of(path: Path) -> Path:
    """The file that is replaced: what a link points to, and nothing that is no file.

    Raises:
        OSError: a folder, a device or a pipe is there, or a link to itself.
    """
    target = Path(os.path.realpath(path))
    if os.path.lexists(target) and not target.is_file():
        raise OSError("it is no regular file")
    return target


def _replace(path: Path, text: str) -> None:
    """Write beside the file, then put it in its place at once, with the rights that it had."""
    temporary = path.parent / f".{path.name}.{secrets.token_hex(8)}"
    try:
        # names may have halves of characters: written as JSON spells them, they can be read again
        with temporary.open("x", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        if path.exists():
            shutil.copymode(path, temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _as_json(record: SizeRecord) -> dict[str, Any]:
    return {"ok": record.ok, "bad": record.bad, "device": record.device}


def _checked_sizes(content: Any) -> list[Any]:
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError(f"it does not say that it holds {_FORMAT!r}")
    if content.get("version") != _VERSION:
        raise ValueError(f"its version is {content.get('version')!r}, and not {_VERSION}")
    if not isinstance(content.get("sizes"), list):
        raise ValueError("it has no list of sizes")
    sizes: list[Any] = content["sizes"]
    return sizes


def _entry(item: Any) -> tuple[tuple[str, str], SizeRecord]:
    match item:
        case {
            "site": str(site),
            "signature": str(signature),
            "ok": int(ok),
            "bad": (int() | None) as bad,
            "device": (str() | None) as device,
        } if ok >= 0 and (bad is None or ok < bad):
            return (site, signature), SizeRecord(ok, bad, device=device)
    raise ValueError(f"one of its sizes is {item!r:.200}")
