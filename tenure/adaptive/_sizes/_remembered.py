"""For what sizes are remembered, as toma's caches say, and where one call finds its record.

Invariant: a call of whose site nothing is known costs one look into a dictionary; all else, such as
names and signatures, is done where something ran out of memory.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from tenure._callers import position_of
from tenure._errors import AdaptiveUsageError

from ._learned import SiteKey, SizeSite, add, find, from_files, signature_of, sites
from ._model import SizeModel

_ROOM = "tenure.adaptive"
_Split = tuple[Tensor, int]
"""A tensor of any shape, and the dimension of it that is split."""
_PLAIN = (str, int, float, bool, bytes, type(None))
_ANSWERS = ("nothing", "function", "call")


# --- for what: named by their class, as ``cache_type=``, and never instantiated


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


CacheType = type[BatchsizeCache]
"""How a cache is named in a call: by its class."""


def checked_cache_type(cache_type: object) -> CacheType:
    """Return the class that was given; for None the room's ``DEFAULT_CACHE_TYPE``, as it is now.

    Raises:
        AdaptiveUsageError: it is no cache type, or one that does not say for what.
    """
    named = "cache_type"
    if cache_type is None:
        named = f"{_ROOM}.DEFAULT_CACHE_TYPE"
        cache_type = sys.modules[_ROOM].DEFAULT_CACHE_TYPE
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


# --- where


class RememberedCall:
    """Where one call looks up what is known, and leaves what it learns.

    Args:
        owner: what stands for the function that runs; None: the call does.
        frame: the frame that calls; it is held as long as the call lasts.
        context: what the user wants sizes to be remembered for; None: the function and the call.
        cache_type: what sizes are remembered for; None: as ``DEFAULT_CACHE_TYPE`` says. If it is
            for nothing, no call finds what this one learns.
        args: what is passed on by position.
        kwargs: what is passed on by name.
        function: what runs; the module of a method counts as one of its arguments.
        split: the tensor of any shape that is split, and its dimension; None: none is.
        adds_gradients: whether gradients of before stand beside those that the call makes, which
            leaves less memory; asked where something is known, or is learned. By default none do.

    Raises:
        AdaptiveUsageError: the context or the cache type can't be used.
    """

    __slots__ = ("_arguments", "_cache_type", "_context", "_frame", "_function", "_owner", "_split")

    def __init__(
        self,
        owner: object,
        frame: FrameType,
        context: Any,
        cache_type: CacheType | None,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        function: object = None,
        split: _Split | None = None,
        adds_gradients: Callable[[], bool] = bool,
    ) -> None:
        if context is not None:
            check_context(context)
        self._cache_type = checked_cache_type(cache_type)
        self._owner, self._frame, self._context = owner, frame, context
        self._function, self._split = function, split
        self._arguments = args, kwargs, adds_gradients

    def known(self) -> SizeModel | None:
        """Return the record of this call; None where nothing is known."""
        # by far the most: nothing has failed in this process, and so nothing is known
        if not (sites or from_files) or self._cache_type.remembered_for == "nothing":
            return None
        site = find(self._key())
        if site is None:
            if not from_files:
                return None
            site = self._add()
        return site.known(self._signature())

    def new(self) -> SizeModel:
        """Return the record of this call, an empty one where nothing is known."""
        if self._cache_type.remembered_for == "nothing":
            return SizeModel()
        return self._add().new(self._signature())

    def _key(self) -> SiteKey:
        cache_type, context = self._cache_type, self._context
        if context is not None:
            # spelled, because 1, 1.0 and True are equal, and have the same hash
            if _is_plain(context):
                return cache_type, "context", repr(context)
            return cache_type, "context", type(context), id(context)
        owner, frame = self._owner, self._frame
        if cache_type.remembered_for == "function" and owner is not None:
            return cache_type, id(owner)
        # the instruction, not the line: of two calls on one line each has sizes of its own
        return cache_type, id(owner), id(frame.f_code), frame.f_lasti

    def _add(self) -> SizeSite:
        about, names = self._named()
        # a site without a name that is the same in each process is in no file
        name = " | ".join([self._cache_type.__name__, *names]) if all(names) else ""
        return add(self._key(), name, about)

    def _named(self) -> tuple[list[object], list[str]]:
        """Return the objects that the site is about, and the parts of its name."""
        context, owner, frame = self._context, self._owner, self._frame
        if context is not None:
            if _is_plain(context):
                return [], [f"context {context!r}"]
            return [context], [""]
        about, names = ([], []) if owner is None else ([owner], [_name_of(owner)])
        if owner is None or self._cache_type.remembered_for == "call":
            return [*about, frame.f_code], [*names, _name_of_call(frame)]
        return about, names

    def _signature(self) -> str:
        function, (args, kwargs, adds_gradients) = self._function, self._arguments
        # a module that runs is in training or evaluation like one that is passed
        of = function.__self__ if isinstance(function, MethodType) else function
        args = (of, *args) if isinstance(of, nn.Module) else args
        chunked, dimension = self._split or (None, 0)
        adds = adds_gradients()
        return signature_of(args, kwargs, chunked, dimension, adds_gradients=adds)


def calling_frame() -> FrameType:
    """Return the frame that calls who asks; where nothing in Python does, the frame of who asks.

    Functions that are run at exit, and those that are a thread's first, are called so.
    """
    try:
        return sys._getframe(2)
    except ValueError:
        return sys._getframe(1)


def stands_for(function: Any) -> object:
    """Return the key of a function's sizes: its code, so that new closures share it.

    Callables without code stand for themselves; what can't be referred to weakly, for its class.
    """
    while (inner := _inside(function)) is not None:
        function = inner
    code = getattr(function, "__code__", None)
    if isinstance(code, CodeType):
        return code
    return function if type(function).__weakrefoffset__ else type(function)


def _inside(function: Any) -> Any:
    """Return the function that a wrapper only calls; None if it is no wrapper."""
    if isinstance(function, functools.partial):
        return function.func
    if isinstance(function, MethodType):
        return function.__func__
    # the code of a decorator, such as torch.no_grad(), is one for all that it decorates
    return vars(function).get("__wrapped__") if isinstance(function, FunctionType) else None


def check_context(context: object) -> None:
    """Make sure that sizes can be remembered for a context.

    Raises:
        AdaptiveUsageError: it is neither made of plain values nor something to refer to weakly.
    """
    if not _is_plain(context) and not type(context).__weakrefoffset__:
        raise AdaptiveUsageError(
            f"context={context!r} can't stand for a memory of sizes. Use a str, a number, a tuple "
            "of those, or an object of a class of your own."
        )


def _is_plain(context: object) -> bool:
    if type(context) is tuple:
        return all(map(_is_plain, context))
    return type(context) in _PLAIN


def _name_of(owner: object) -> str:
    if isinstance(owner, CodeType):
        return f"{Path(owner.co_filename).stem}:{owner.co_qualname}"
    module, name = getattr(owner, "__module__", ""), getattr(owner, "__qualname__", "")
    return f"{module}:{name}" if module and name else ""


def _name_of_call(frame: FrameType) -> str:
    """Return a frame's name, stable between processes and after edits elsewhere in the file."""
    code = frame.f_code
    line, column = position_of(code, frame.f_lasti)
    # counted from the first line of the function: changes above it move all of its lines
    below = "" if line is None else f"+{line - code.co_firstlineno}:{column or 0}"
    return f"{Path(code.co_filename).stem}:{code.co_qualname}{below}"
