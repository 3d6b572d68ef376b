"""Whether an exception is an out-of-memory error, and what it says: alone, or in its chain.

An exception by itself is judged by what it can never be, then by its type, then by its text.

Invariant: nothing here raises for what an exception is made of, whatever a subclass overrides, and
nothing keeps a reference to an exception, its traceback or its frames.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from tenure._devices import free_memory
from tenure._errors import AdaptiveUsageError, OutOfRetriesError, TenureError

from ._patterns import (
    MOST_OF_TEXT,
    NEVER_TEXT,
    Oom,
    OomKind,
    builtin_oom,
    device_in,
    registered_oom,
    requested_bytes_in,
    text_of,
    type_name,
)

# The interpreter's own slots: a subclass may shadow the names with properties that raise.
_CAUSE: Any = vars(BaseException)["__cause__"]
_CONTEXT: Any = vars(BaseException)["__context__"]
_SUPPRESS: Any = vars(BaseException)["__suppress_context__"]
_MEMBERS: Any = vars(BaseExceptionGroup)["exceptions"]
_DEVICE = Oom("device")
_HOST = Oom("host", "cpu")
_BY_NAME = {"OutOfMemoryError": _DEVICE, "MemoryError": _HOST}
_BROKEN_GROUP = Oom("device", retry_safe=False)
# cudaErrorMemoryAllocation and hipErrorOutOfMemory; torch sets error_code where C++ raises.
# https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html
_ALLOCATION = 2
_Link = tuple[BaseException, Any]
"""An exception of a chain, and the link of the one above it, through which it was reached."""
# A build without torch.distributed has no such error.
_DIST_ERROR: type[RuntimeError] | tuple[()] = getattr(torch.distributed, "DistError", ())
# An error at the beginning of a line, as Python prints it; torchrun writes the rank before it.
_MESSAGE = re.compile(
    r"^(?:\[[^\]\n]{1,40}\]:?[ \t]*)?"
    r"((?![nr]ccl)[A-Za-z_][\w.]{0,200}(?:Error|Exception))(?::\s|:?$)",
    re.MULTILINE,
)
_COLOURS = re.compile(r"\x1b\[[\d;]*m")
_NEXT_TRACEBACK = "Traceback (most recent call last):\n"
_LITTLE_BYTES = 1 << 29
"""What a handle and the kernels that come with it take at the most, generously."""
_OFTEN_OOM = re.compile(
    # cuSPARSE says what its status means, the others print its name
    r"\b(?:(?:CU|HIP|ROC)[A-Z]{2,10}_STATUS_(?:NOT_INITIALIZED|INTERNAL_ERROR|INSUFFICIENT_RESOURCES)"
    r"|insufficient resources|initialization error),? when calling "
    r"`(?:cu|hip|roc)\w{2,20}[cC]reate\w{0,20}\(&?handle\)"
    r"|\bcuDNN error: CUDNN_STATUS_NOT_INITIALIZED\b"
    # no algorithm had the working memory that it asked torch for, or none does what was asked
    r"|\bCUDNN_STATUS_NOT_SUPPORTED\b"
    r"|(?i:\bunable to find (?:a valid cuDNN algorithm|an engine to execute this computation)\b)"
)
"""Texts of errors that lack of memory causes, or something else.

Source: the checks of ``aten/src/ATen/cuda/Exceptions.h``, and who calls them with a handle;
``aten/src/ATen/native/cudnn/Conv_v8.cpp``.
"""


@dataclass(frozen=True, slots=True)
class OomInfo:
    """What an out-of-memory error tells; plain values, so keeping it keeps no tensor alive.

    Attributes:
        kind: what ran out. ``"device"``: the device's memory; ``"host"``: that of the machine, or
            its shared memory; ``"workspace"``: a library such as cuDNN got no working memory;
            ``"driver"``: the driver below the allocator; ``"size_limit"``: one tensor is larger
            than the backend allows, so that only smaller work helps, and freeing memory does not.
        device: the device as torch spells it, ``"cuda:0"``, without the index where the text has
            none; ``"cpu"`` for the host; None where it can't be told.
        requested_bytes: bytes of the allocation that failed, as exactly as the text has them; None
            where it has none.
        retry_safe: whether the process can try again. False where the failure broke more than the
            attempt, as it does to an NCCL communicator or to a Level Zero context.
        text: the message; of one longer than 16 Ki characters, its beginning and its end.
        chain: types of the exceptions from the one asked about to the one recognised, which is the
            last; of a text the type that it names, if it names one.
    """

    kind: OomKind
    device: str | None
    requested_bytes: int | None
    retry_safe: bool
    text: str
    chain: tuple[str, ...]


def oom_info(error: BaseException | str) -> OomInfo | None:
    """Recognise an out-of-memory error, and say what it tells; None for any other.

    Looks at the exception, the members of exception groups, ``__cause__``, and ``__context__``
    unless it is suppressed. What is never an out-of-memory error hides those below it: an
    interrupt, an illegal memory access, or a failed assertion that came while one was handled.

    Args:
        error: the exception that an ``except`` clause caught, of any type; or a text, such as a
            traceback or a log, in which the last message of an out-of-memory error counts.

    Raises:
        AdaptiveUsageError: it is neither.

    Example:
        >>> import torch
        >>> try:
        ...     torch.empty(2**60, dtype=torch.uint8)
        ... except RuntimeError as error:
        ...     info = oom_info(error)
        >>> info.kind, info.device, info.requested_bytes == 2**60, info.retry_safe
        ('host', 'cpu', True, True)
        >>> oom_info("torch.OutOfMemoryError: HIP out of memory. GPU 1 has a total ...").device
        'cuda:1'
    """
    if type(error) is str:
        return _info_of_text(error)
    return oom_of_work(_checked(error, "oom_info"), None)


def _info_of_text(text: str) -> OomInfo | None:
    """Return what the last message in a text says that is of an out-of-memory error."""
    # without the name of a type, what stands at the end of a log
    head, *typed = _MESSAGE.split(_COLOURS.sub("", text))
    messages = [("", head[-MOST_OF_TEXT:]), *zip(typed[::2], typed[1::2], strict=True)]
    for name, message in reversed(messages):
        message = message[:MOST_OF_TEXT].partition(_NEXT_TRACEBACK)[0].strip()
        if NEVER_TEXT.search(message):
            continue
        named = next((oom for kind, oom in _BY_NAME.items() if name.endswith(kind)), None)
        if (oom := registered_oom(message) or builtin_oom(message) or named) is not None:
            return _info(oom, (name,) if name else (), message)
    return None


def oom_of_work(exc: BaseException, outside: BaseException | None) -> OomInfo | None:
    """Return what `oom_info` says of an error, as if no other error were being handled.

    Args:
        exc: what the work raised.
        outside: the exception that was handled when the work began. The interpreter makes it the
            context of what is raised inside, though neither came of the other: it, and what it
            came of, tells nothing.
    """
    found: OomInfo | None = None
    seen = _ids_in(outside)
    waiting: list[_Link] = [(exc, None)]
    while waiting:
        link = waiting.pop()
        one = link[0]
        if id(one) in seen:
            continue
        seen.add(id(one))
        text = text_of(one)
        verdict = _verdict_on(one, text)
        # it hides those below: to try again would repeat a bug, use a device that no longer works,
        # or swallow an interrupt
        if verdict is False:
            return None
        if verdict is None:
            waiting += [(other, link) for other in _below(one, also_suppressed=False)[::-1]]
        # of several in a group the one after which nothing may be tried again
        elif found is None or (found.retry_safe and not verdict.retry_safe):
            found = _info(verdict, _types_of(link), text)
    return found


def is_oom(exc: BaseException) -> bool:
    """Return whether an exception is an out-of-memory error, or came of one: see `oom_info`.

    Args:
        exc: the exception that an ``except`` clause caught, of any type.

    Raises:
        AdaptiveUsageError: it is no exception.

    Example:
        >>> is_oom(MemoryError()), is_oom(ValueError("CUDA out of memory"))
        (True, False)
    """
    return oom_of_work(_checked(exc, "is_oom"), None) is not None


def _types_of(link: _Link | None) -> tuple[str, ...]:
    chain: list[str] = []
    while link is not None:
        chain.append(type_name(link[0]))
        link = link[1]
    return tuple(chain[::-1])


def _info(oom: Oom, chain: tuple[str, ...], text: str) -> OomInfo:
    return OomInfo(
        kind=oom.kind,
        device=device_in(text, oom.device),
        requested_bytes=requested_bytes_in(text),
        retry_safe=oom.retry_safe,
        text=text,
        chain=chain,
    )


def _checked(exc: Any, call: str) -> BaseException:
    if not issubclass(type(exc), BaseException):
        raise AdaptiveUsageError(
            f"{call}() wants an exception, and got {_described(exc)}. "
            "Pass the one that an except clause caught."
        )
    found: BaseException = exc
    return found


def _described(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"an object of type {type(value).__name__}"


def chain_of(exc: BaseException, outside: BaseException | None = None) -> Iterator[BaseException]:
    """Yield the exception and all that it came of, suppressed or not, each once.

    Args:
        exc: what was caught.
        outside: the exception that was handled when the work began; it, and what it came of,
            belongs to the caller and is left out.
    """
    seen = _ids_in(outside)
    waiting = [exc]
    while waiting:
        one = waiting.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            # suppressed or not: a context that nobody sees holds its frames all the same
            waiting += _below(one, also_suppressed=True)


def _ids_in(outside: BaseException | None) -> set[int]:
    """Return the identities of an exception and of all that it came of."""
    return set() if outside is None else {id(one) for one in chain_of(outside)}


def _below(exc: BaseException, *, also_suppressed: bool) -> list[BaseException]:
    below = list(_MEMBERS.__get__(exc)) if issubclass(type(exc), BaseExceptionGroup) else []
    below.append(_CAUSE.__get__(exc))
    if also_suppressed or not _SUPPRESS.__get__(exc):
        below.append(_CONTEXT.__get__(exc))
    return [other for other in below if other is not None]


def _verdict_on(exc: BaseException, text: str) -> Oom | Literal[False] | None:
    """Classify an exception by itself; None if the exceptions below it in its chain decide.

    Returns:
        False if it is none, whatever stands below it.
    """
    kind = type(exc)
    if not issubclass(kind, Exception):
        # interrupts and exits, cancellations, and groups that hold one
        return False
    # A type is certain where a text is a guess; what is never one comes before the texts, because
    # a long one may say both.
    if (found := _by_type(exc, text)) is not None:
        return found
    never = issubclass(kind, (TenureError, AssertionError)) or NEVER_TEXT.search(text)
    # the cause of the one tells
    if never and not issubclass(kind, OutOfRetriesError):
        return False
    return _by_text(kind, text)


def _by_type(exc: BaseException, text: str) -> Oom | None:
    kind = type(exc)
    if issubclass(kind, torch.OutOfMemoryError):
        # not every allocator names the device in its first words
        found = builtin_oom(text)
        return found if found is not None and found.kind == "device" else _DEVICE
    if issubclass(kind, MemoryError):
        # allocators of other libraries name the device
        return builtin_oom(text) or _HOST
    if issubclass(kind, torch.AcceleratorError) and _number(exc, "error_code") == _ALLOCATION:
        return builtin_oom(text) or _DEVICE
    if issubclass(kind, OSError) and _number(exc, "errno") == errno.ENOMEM:
        return _HOST
    return None


def _by_text(kind: type[BaseException], text: str) -> Oom | None:
    if not issubclass(kind, RuntimeError):
        return None
    if issubclass(kind, _DIST_ERROR) and "out of memory" in text:
        return _BROKEN_GROUP
    return registered_oom(text) or builtin_oom(text) or _oom_if_full(text)


def _number(exc: BaseException, attribute: str) -> int | None:
    try:
        value = getattr(exc, attribute, None)
    # a subclass may raise anything from a property, and a verdict must not
    except Exception:
        return None
    return value if type(value) is int else None


def _oom_if_full(text: str) -> Oom | None:
    """Return an error that is often one of memory: it counts only while little is free.

    A library of CUDA takes the memory of its first handle from the driver, beside torch's
    allocator, and says of a failure only that it is not initialized, as after a wrong installation.
    cuDNN raises one text for an input that it can't use and for a workspace that it did not get.
    """
    if not _OFTEN_OOM.search(text):
        return None
    device = _device_with_little_free()
    return None if device is None else Oom("workspace", device)


def _device_with_little_free() -> str | None:
    """Return a device in use that is nearly full, because the text names none."""
    if not torch.cuda.is_initialized():
        return None
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        try:
            # of one without memory, asking would bring a context to life, which takes some
            if not torch.cuda.memory_reserved(device):
                continue
            told = free_memory(torch.cuda, device)
            if told is not None and told[0] < _LITTLE_BYTES:
                return str(device)
        # a device that is broken tells nothing any more
        except Exception:
            continue
    return None
