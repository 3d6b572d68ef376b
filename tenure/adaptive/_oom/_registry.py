"""Patterns that users register for backends of their own.

Invariant: the tuple of registrations is replaced under a lock and never changed, so that threads
read it without one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from threading import Lock
from typing import Self, get_args

from tenure._errors import AdaptiveUsageError

from ._texts import Oom, OomKind

_lock = Lock()
_registered: tuple[OomRegistration, ...] = ()


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class OomRegistration:
    """A pattern that counts as out of memory until it is taken back; made by `register_oom`.

    As a context it is taken back at the end of the block.

    Attributes:
        pattern: what is searched for in the text of each RuntimeError.
        kind: the `OomInfo.kind` of what it finds.
        retry_safe: the `OomInfo.retry_safe` of what it finds.
    """

    pattern: re.Pattern[str]
    kind: OomKind
    retry_safe: bool

    def unregister(self) -> None:
        """Take the pattern back; a second time does nothing."""
        global _registered
        with _lock:
            _registered = tuple(other for other in _registered if other is not self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.unregister()

    def __repr__(self) -> str:
        state = "registered" if self in _registered else "taken back"
        return f"<OomRegistration {self.pattern.pattern!r} as {self.kind!r}, {state}>"


def register_oom(
    pattern: str | re.Pattern[str], kind: OomKind, *, retry_safe: bool = True
) -> OomRegistration:
    """Count the RuntimeErrors of a backend as out of memory, on all threads of the process.

    The newest registration is asked first, and all of them before what is built in. What is never
    an out-of-memory error stays none.

    Args:
        pattern: a regular expression, searched for in the text of the error.
        kind: what ran out, see `OomInfo`.
        retry_safe: whether work can be tried again after it.

    Returns:
        The registration: ``unregister()`` takes it back, and so does the end of a ``with`` block.

    Raises:
        AdaptiveUsageError: the pattern is no regular expression or fits every text, or the kind is
            unknown. Nothing was registered.

    Example:
        >>> from tenure.adaptive import is_oom, register_oom
        >>> with register_oom(r"NPU pool exhausted", "device"):
        ...     is_oom(RuntimeError("NPU pool exhausted (3 of 3 blocks)"))
        True
        >>> is_oom(RuntimeError("NPU pool exhausted (3 of 3 blocks)"))
        False
    """
    global _registered
    registration = OomRegistration(_compiled(pattern), _checked_kind(kind), bool(retry_safe))
    with _lock:
        _registered = (registration, *_registered)
    return registration


def registered_oom(text: str) -> Oom | None:
    """What the newest registration that fits a text says of it."""
    for registration in _registered:
        if registration.pattern.search(text):
            return Oom(registration.kind, retry_safe=registration.retry_safe)
    return None


def _compiled(pattern: object) -> re.Pattern[str]:
    written = pattern.pattern if isinstance(pattern, re.Pattern) else pattern
    if not isinstance(written, str):
        raise AdaptiveUsageError(
            "register_oom() wants a regular expression over str, and got one of type "
            f"{type(written).__name__}. Write it as text, such as r'pool exhausted'."
        )
    try:
        compiled: re.Pattern[str] = re.compile(pattern)  # type: ignore[call-overload]  # as checked
    except (re.error, RecursionError, OverflowError) as error:
        raise AdaptiveUsageError(
            f"register_oom() got the pattern {written!r}, which is no regular expression: {error}. "
            "Escape plain text with re.escape()."
        ) from error
    # a pattern such as "a|" or ".*" is a slip of the pen, and would make each error one of memory
    if compiled.search(""):
        raise AdaptiveUsageError(
            f"register_oom() got the pattern {written!r}, which fits any text, so that every "
            "RuntimeError would count as out of memory. Write what only this error says."
        )
    return compiled


def _checked_kind(kind: object) -> OomKind:
    for known in get_args(OomKind):
        if kind == known:
            return known  # type: ignore[no-any-return]  # get_args forgets the literal
    raise AdaptiveUsageError(
        f"kind={kind!r} is not one of {', '.join(map(repr, get_args(OomKind)))}."
    )
