"""The arguments of all entry points, checked once, where a function is decorated or called."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypedDict

from tenure._errors import AdaptiveUsageError

from .._attempt import OnRetry
from .._sizes import (
    BatchsizeCache,
    SizeLimits,
    check_context,
    checked_cache_type,
    checked_initial,
    checked_limits,
)
from ._collect import Collect, Collector, collector_for


@dataclass(frozen=True, slots=True)
class Options:
    """How the calls of one function are run: AdaptiveOptions, checked.

    Attributes:
        initial: the size that a call begins with; None: the call says it.
        owner: the key of the memory of sizes, beside the call; None: the call alone.
        new_collector: makes the collector of one call; None: results are dropped.
        dimension: the dimension to split.
    """

    initial: int | None = None
    owner: Any = None
    new_collector: Callable[[], Collector] | None = None
    dimension: Any = 0
    cache_type: type[BatchsizeCache] | None = None
    context: Any = None
    limits: SizeLimits = field(default_factory=SizeLimits)
    restore_rng: bool = False
    on_retry: OnRetry | None = None
    predict: bool = False


class AdaptiveOptions(TypedDict, total=False):
    """The arguments that all decorators share.

    Attributes:
        cache_type: what sizes are remembered for; None: what ``DEFAULT_CACHE_TYPE`` says then.
        context: what shares a memory of sizes; None: the function and the call.
        minimum: no smaller size is tried.
        maximum: how far the size may grow; None: not beyond the initial one.
        align: sizes are multiples of it, except an initial size below it.
        restore_rng: whether a failed attempt leaves random generators as they were.
        on_retry: called with each AdaptiveEvent.
        predict: of `batch`: whether the first failure is answered by the size that `predict_peak`
            says fits; the function runs on tensors without data for that.
    """

    cache_type: type[BatchsizeCache] | None
    context: Any
    minimum: int
    maximum: int | None
    align: int
    restore_rng: bool
    on_retry: OnRetry | None
    predict: bool


_WORDS_FOR_SIZES = ("size", "step", "batch", "chunk")
_GIVEN = AdaptiveOptions.__annotations__.keys() | {"dimension"}
"""The options that a user gives by the names of `Options`, or of `checked_options`."""


def checked_options(
    initial_name: str,
    initial: int | None,
    /,
    *,
    collect: Collect | None = None,
    minimum: int = 1,
    maximum: int | None = None,
    align: int = 1,
    **options: Any,
) -> Options:
    """Check the options of a user, whose name for the first size is ``initial_name``.

    Raises:
        AdaptiveUsageError: one can't be used, or is none.
    """
    for name in options:
        if name not in _GIVEN:
            raise AdaptiveUsageError(_no_such_option(name, initial_name))
    if options.get("predict") and initial_name == "initial_step":
        raise AdaptiveUsageError(
            "predict= is for batch(): range() and chunked() find the size of each piece by those "
            "before it. Leave it out."
        )
    if options.get("cache_type") is not None:
        checked_cache_type(options["cache_type"])
    if options.get("context") is not None:
        check_context(options["context"])
    on_retry = options.get("on_retry")
    if on_retry is not None and not callable(on_retry):
        raise AdaptiveUsageError(
            f"on_retry={on_retry!r} can't be called. Give a function, or None."
        )
    limits = checked_limits(minimum, maximum, align)
    return Options(
        initial=checked_initial(initial_name, initial, limits),
        new_collector=collector_for(collect),
        limits=limits,
        **options,
    )


def _no_such_option(name: str, initial_name: str) -> str:
    known = [initial_name, *AdaptiveOptions.__annotations__]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    # names of other libraries: accelerate's starting_batch_size, Lightning's batch_size
    if any(word in name for word in _WORDS_FOR_SIZES):
        bounds = [f"{word}imum" for word in ("min", "max") if word in name]
        near = [*bounds, initial_name]
    hint = (
        f"Did you mean {near[0]!r}?" if near else f"The options of all are {', '.join(known[1:])}."
    )
    return f"{name!r} is no argument of this function. {hint}"
