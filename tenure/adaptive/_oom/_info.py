"""Telling an out-of-memory error from any other, wherever it stands in a chain of exceptions.

Invariant: nothing here raises for what an exception is made of, and nothing keeps a reference to an
exception, its traceback or its frames.
"""

from __future__ import annotations

from dataclasses import dataclass

from tenure._errors import AdaptiveUsageError

from ._chain import Link, ids_in, links_below
from ._rules import Oom, OomKind
from ._verdict import NEVER, verdict_on
from ._wanted_bytes import device_in, requested_bytes_in, text_of, type_name


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
            last.
    """

    kind: OomKind
    device: str | None
    requested_bytes: int | None
    retry_safe: bool
    text: str
    chain: tuple[str, ...]


def oom_info(exc: BaseException) -> OomInfo | None:
    """Recognise an out-of-memory error, and say what it tells; None for any other exception.

    Looks at the exception, the members of exception groups, ``__cause__``, and ``__context__``
    unless it is suppressed. What is never an out-of-memory error hides those below it: an
    interrupt, an illegal memory access, or a failed assertion that came while one was handled.

    Args:
        exc: the exception that an ``except`` clause caught, of any type.

    Raises:
        AdaptiveUsageError: it is no exception.

    Example:
        >>> import torch
        >>> try:
        ...     torch.empty(2**60, dtype=torch.uint8)
        ... except RuntimeError as error:
        ...     info = oom_info(error)
        >>> info.kind, info.device, info.requested_bytes == 2**60, info.retry_safe
        ('host', 'cpu', True, True)
    """
    _check_exception(exc, "oom_info")
    return oom_of_work(exc, None)


def oom_of_work(exc: BaseException, outside: BaseException | None) -> OomInfo | None:
    """What `oom_info` says of an error of work, were it not called where another is handled.

    Args:
        exc: what the work raised.
        outside: the exception that was handled when the work began. The interpreter makes it the
            context of what is raised inside, though neither came of the other: it, and what it
            came of, tells nothing.
    """
    found: OomInfo | None = None
    seen = ids_in(outside)
    waiting = [Link(exc, None)]
    while waiting:
        link = waiting.pop()
        if id(link.exception) in seen:
            continue
        seen.add(id(link.exception))
        text = text_of(link.exception)
        verdict = verdict_on(link.exception, text)
        # it hides those below: to try again would repeat a bug, use a device that no longer works,
        # or swallow an interrupt
        if verdict is NEVER:
            return None
        if not isinstance(verdict, Oom):
            waiting.extend(reversed(links_below(link)))
        # of several in a group the one after which nothing may be tried again
        elif found is None or (found.retry_safe and not verdict.retry_safe):
            found = _info(verdict, link, text)
    return found


def is_oom(exc: BaseException) -> bool:
    """Whether an exception is an out-of-memory error, or came of one: see `oom_info`.

    Args:
        exc: the exception that an ``except`` clause caught, of any type.

    Raises:
        AdaptiveUsageError: it is no exception.

    Example:
        >>> is_oom(MemoryError()), is_oom(ValueError("CUDA out of memory"))
        (True, False)
    """
    _check_exception(exc, "is_oom")
    return oom_info(exc) is not None


def _info(oom: Oom, link: Link, text: str) -> OomInfo:
    return OomInfo(
        kind=oom.kind,
        device=device_in(text, oom.device),
        requested_bytes=requested_bytes_in(text),
        retry_safe=oom.retry_safe,
        text=text,
        chain=tuple(type_name(above.exception) for above in link.path()),
    )


def _check_exception(exc: object, call: str) -> None:
    if not issubclass(type(exc), BaseException):
        raise AdaptiveUsageError(
            f"{call}() wants an exception, and got {_described(exc)}. "
            "Pass the one that an except clause caught."
        )


def _described(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"an object of type {type(value).__name__}"
