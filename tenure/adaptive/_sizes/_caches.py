"""toma's three answers to the question for what a size that was found is remembered.

They are named by their class, as ``cache_type=``, and never instantiated.
"""

from __future__ import annotations

import sys
from typing import ClassVar, Literal

from tenure._errors import AdaptiveUsageError

_ROOM = "tenure.adaptive"


class BatchsizeCache:
    """What a size is remembered for.

    Attributes:
        remembered_for: ``"nothing"``, the ``"function"``, or the function and the ``"call"`` of it.
    """

    remembered_for: ClassVar[Literal["nothing", "function", "call"]]


class NoBatchsizeCache(BatchsizeCache):
    """Nothing is remembered: each call begins with its initial size."""

    remembered_for = "nothing"


class GlobalBatchsizeCache(BatchsizeCache):
    """A size is remembered for the function, or for the ``context``, wherever it is called."""

    remembered_for = "function"


class StacktraceMemoryBatchsizeCache(BatchsizeCache):
    """A size is remembered for the function and the call of it: the default.

    The same call learns nothing anew; another one begins with its initial size. When memory has
    come free since, larger sizes are tried.
    """

    remembered_for = "call"


_ANSWERS = ("nothing", "function", "call")

CacheType = type[BatchsizeCache]
"""How a cache is named in a call: by its class."""


def checked_cache_type(cache_type: object) -> type[BatchsizeCache]:
    """The class that was given; for None the room's ``DEFAULT_CACHE_TYPE``, as it is now.

    Raises:
        AdaptiveUsageError: it is no cache type, or one that does not say for what.
    """
    named = "cache_type"
    if cache_type is None:
        named = f"{_ROOM}.DEFAULT_CACHE_TYPE"
        cache_type = sys.modules[_ROOM].DEFAULT_CACHE_TYPE
    if cache_type is StacktraceMemoryBatchsizeCache or cache_type is GlobalBatchsizeCache:
        return cache_type  # by far the most
    if isinstance(cache_type, type) and issubclass(cache_type, BatchsizeCache):
        if getattr(cache_type, "remembered_for", None) in _ANSWERS:
            return cache_type
        raise AdaptiveUsageError(
            f"{named} is {cache_type!r}, which does not say what sizes are remembered for. Give it "
            'remembered_for = "nothing", "function" or "call".'
        )
    raise AdaptiveUsageError(
        f"{named} is {cache_type!r}, which is no cache type. Use NoBatchsizeCache, "
        "GlobalBatchsizeCache or StacktraceMemoryBatchsizeCache, the class itself."
    )
