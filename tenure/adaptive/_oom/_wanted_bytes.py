"""What the text of an out-of-memory error says: how many bytes were wanted, and where."""

from __future__ import annotations

import re

from tenure._errors import ByteSizeError
from tenure._text import parse_bytes

# C++ stack traces follow the message, and a worker's traceback stands before it.
_KEPT = 8 * 1024
_CUT = "\n[...]\n"

_NUMBER = r"([0-9][0-9,]{0,30}(?:\.[0-9]{0,30})?)"
_SIZE = rf"{_NUMBER} ?(bytes|[KMGTPE]i?B)\b"
# In the order of their use: where a text has the exact number as well, it stands first here.
_REQUESTS = tuple(
    re.compile(pattern)
    for pattern in (
        rf"Tried to allocate [0-9.]+ [KMGTPE]?i?B \({_NUMBER} (bytes)\)",
        rf"(?i:tried|trying) to (?:allocate|mmap) {_SIZE}",
        rf"Invalid buffer size: {_SIZE}",
        rf"Unable to allocate {_SIZE}",
        rf"unable to mmap {_SIZE}",
        rf"Could not allocate tensor with {_SIZE}",
        rf"Out of memory allocating {_SIZE}",
        rf"Failed to CUDA \w*alloc(?: async)? {_SIZE}",
        rf"\bRequested(?: size)?\s{{0,40}}: {_SIZE}",
        rf"Allocation failed for size::{_NUMBER}()",
    )
)
_UNALLOCATED = re.compile(rf"\b{_SIZE} is reserved by PyTorch but unallocated\b")
# The allocators' GB of 2**30 bytes: older MPS and mmap texts say 19.45 GB for 19.45 GiB.
# https://github.com/pytorch/pytorch/issues/141909
_DECIMAL_UNIT = re.compile(r"([KMGTPE])B")

_PLACE = re.compile(r"\b(CUDA|HIP|XPU|NPU|MUSA|MLU|HPU|MPS)(?: backend)? out of memory\b")
_NAMED_PLACE = re.compile(r"\b([A-Za-z]\w{0,40}:[0-9]{1,4}|cpu) out of memory\b")
_INDEX = re.compile(r"\b(?:GPU|NPU|XPU|MUSA|MLU|HPU|device)  ?([0-9]{1,4})\b")


def text_of(exc: BaseException) -> str:
    """The message of an exception, shortened in its middle; empty when it has none to give."""
    try:
        # exactly a str: a subclass may hold what the exception holds
        text = str.__str__(str(exc))
    # whatever the exception's own __str__ raises, its type still tells
    except Exception:
        return ""
    if len(text) <= 2 * _KEPT:
        return text
    return text[:_KEPT] + _CUT + text[-_KEPT:]


def type_name(exc: BaseException) -> str:
    """The type as tracebacks print it, such as ``torch.OutOfMemoryError``."""
    kind = type(exc)
    try:
        module, name = str.__str__(kind.__module__), str.__str__(kind.__qualname__)
    # a class may be built with anything in the place of these texts
    except Exception:
        return "<unknown type>"
    return name if module == "builtins" else f"{module}.{name}"


def requested_bytes_in(text: str) -> int | None:
    """The bytes that an allocation asked for, in any unit that allocators print."""
    matches = (pattern.search(text) for pattern in _REQUESTS)
    match = next(filter(None, matches), None)
    return (_bytes_of(match) or None) if match is not None else None


def unallocated_bytes_in(text: str) -> int | None:
    """What the allocator held for no tensor when it failed, as CUDA's and XPU's texts end."""
    match = _UNALLOCATED.search(text)
    return _bytes_of(match) if match is not None else None


def device_in(text: str, default: str | None) -> str | None:
    """The device that a text names, as torch spells it, or the one that its rule knows."""
    if named := _NAMED_PLACE.search(text):
        return named[1]
    place = _PLACE.search(text)
    device = place[1].lower().replace("hip", "cuda") if place else default
    index = None if device in (None, "cpu", "mps") else _INDEX.search(text)
    return f"{device}:{index[1]}" if index else device


def _bytes_of(match: re.Match[str]) -> int | None:
    number, unit = match[1].replace(",", ""), _DECIMAL_UNIT.sub(r"\1iB", match[2] or "bytes")
    try:
        return parse_bytes(f"{number} {unit}")
    except ByteSizeError:
        return None
