"""Running a function with a size, over a range, or over a tensor in chunks, until it fits.

Invariant: of a range every number is worked on once, in order, whatever failed in between; how far
the work has come is known to this call alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tenure._callers import warn_user
from tenure._errors import AdaptiveUsageError, AdaptiveUsageWarning
from tenure._text import listed
from tenure._torch.compiler import mark_dynamic
from tenure._torch.quiet import without_functions
from tenure._torch.writes import version_of
from tenure.scopes import DisposeScope

from .._attempt import Attempts
from .._callables import name_of
from .._predict import Forecast
from .._ranks import has_other_ranks
from .._reachable import Reachable, coupled_modules
from .._sizes import AdaptiveSearch, RememberedCall
from .._undo import RngState, generators_in, named_modules
from ._options import Options

_Function = Callable[..., Any]
_Args = tuple[Any, ...]
_Kwargs = Mapping[str, Any]


def run_batch(
    name: str,
    function: _Function,
    initial: int,
    *,
    args: _Args,
    kwargs: _Kwargs,
    options: Options,
    remembered: RememberedCall,
) -> Any:
    """Return ``function(size, *args, **kwargs)``, tried until it fits."""

    def work(size: int) -> Any:
        return function(size, *args, **kwargs)

    forecast = Forecast(name, work) if options.predict else None
    search = AdaptiveSearch(initial, options.limits, remembered, predict=forecast)

    with DisposeScope(name) as scope:
        attempts = Attempts(
            name,
            scope,
            unit="batch size",
            state=_random_state(args, kwargs) if options.restore_rng else None,
            on_retry=options.on_retry,
        )
        result = attempts.run(search, work)
    search.finished()
    if attempts.n_begun > 1 and has_other_ranks():
        _warn_of_other_sizes(name)
    return result


def _warn_of_other_sizes(name: str) -> None:
    warn_user(
        f"{name}() ran out of memory and was run with a smaller batch size on this rank, while "
        "others may have run with a larger one. If all need one size, ask find_batch_size(..., "
        "group=torch.distributed.group.WORLD) on all ranks before.",
        AdaptiveUsageWarning,
    )


class RangePart:
    """The part of a range that is worked on next, as a function of its size.

    Attributes:
        start: the first number.
        end: the number after the last; known once the work began.
        function: does the work.
        dimension: along which results are put together.
        args: what the function gets besides the piece.
        kwargs: the same by name.
    """

    __slots__ = ("args", "end", "function", "kwargs", "start")

    dimension = 0

    def __init__(self, function: _Function, start: int, args: _Args, kwargs: _Kwargs) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.start = self.end = start

    def __call__(self, size: int) -> Any:
        """Work on so many."""
        self.end = self.start + size
        return self.function(self.start, self.end, *self.args, **self.kwargs)


class DimensionPart(RangePart):
    """The part of a tensor that is worked on next, as a function of its size."""

    __slots__ = ("_begun", "_tensor", "dimension")

    def __init__(
        self, function: _Function, tensor: Tensor, dimension: int, args: _Args, kwargs: _Kwargs
    ) -> None:
        super().__init__(function, 0, args, kwargs)
        self._tensor = tensor
        self.dimension = dimension
        # where the last attempt began, and how often the tensor was written before it
        self._begun: tuple[int, int | None] | None = None

    def __call__(self, size: int) -> Any:
        """Work on so many.

        The chunk has no memory of its own: it is a view, which no scope has to own.

        Raises:
            AdaptiveUsageError: the attempt before has written into the rows of this one.
        """
        start, tensor = self.start, self._tensor
        self.end = end = start + size
        before, self._begun = self._begun, (start, version_of(tensor))
        if before is not None and before[0] == start and before != self._begun:
            raise AdaptiveUsageError(
                f"{name_of(self.function)}() has written into its chunk, the rows from {start} on, "
                "and then ran out of memory. Another attempt would find what it has written, such "
                "as rows divided by 255 already. Write into a copy, as in rows = rows / 255."
            )
        # A plain tensor's view is not seen by modes; one of a subclass is its class's to make.
        if type(tensor) is Tensor:
            with without_functions():
                chunk = tensor.narrow(self.dimension, start, size)
        else:
            chunk = tensor.narrow(self.dimension, start, size)
        mark_dynamic(chunk, self.dimension)
        return self.function(chunk, start, end, *self.args, **self.kwargs)


def run_pieces(
    name: str,
    piece: RangePart,
    end: int,
    *,
    initial: int | None,
    options: Options,
    remembered: RememberedCall,
) -> Any:
    """Work on one piece after the other, each as large as fits, from its start to ``end``.

    Args:
        name: what errors and events call the work.
        piece: the first piece; the start of the next is moved to the end of the one before.
        end: the number after the last.
        initial: the size of the first piece, where nothing else is known; None: of the whole.
        options: how failures and results are handled.
        remembered: where sizes are remembered.

    Returns:
        What the collector made of the results.
    """
    # an empty range has no size; the search wants one all the same
    if initial is None:
        initial = max(end - piece.start, options.limits.floor)
    search = AdaptiveSearch(initial, options.limits, remembered, in_pieces=True)
    collector = None if options.new_collector is None else options.new_collector()

    # what may run out of memory while a result is taken is tried again with the piece
    def work(size: int) -> Any:
        result = piece(size)
        if collector is None:
            return None
        return collector.land(result, range(piece.start, piece.end), piece.dimension)

    with DisposeScope(name) as scope:
        attempts = Attempts(
            name,
            scope,
            unit="step",
            state=_random_state(piece.args, piece.kwargs) if options.restore_rng else None,
            on_retry=options.on_retry,
        )
        if collector is not None and collector.needs_one and piece.start >= end:
            collector.add(attempts.run(search, lambda _: work(0)))
        begin, mixing = piece.start, list[_Mixing]()
        while piece.start < end:
            left = end - piece.start
            # only after a failure: until then nothing is measured
            if search.room is not None:
                search.go_on(search.room)
            if search.size > left:
                search.at_most(left)
            landed = attempts.run(search, work)
            if collector is not None:
                collector.add(landed)
                attempts.advice = collector.advice
            # it may be the last that holds memory of the device, which the next piece needs
            del landed
            # only after a failure, as to look for modules takes its time
            if piece.start == begin and attempts.n_begun > 1 and piece.end < end:
                mixing = _mixing_modules(piece)
            # here alone the work goes on: an attempt that failed has left the start where it was
            piece.start = piece.end
    search.finished()
    _warn_of_mixing(name, mixing)
    return None if collector is None else collector.collected(piece.dimension)


class _Mixing(NamedTuple):
    """A module that mixes samples.

    Attributes:
        told: what warnings call it.
        mean: its running mean, if it has one.
        before: a copy of that; None if it has no numbers yet.
    """

    told: str
    mean: Tensor | None
    before: Tensor | None

    def has_mixed(self) -> bool:
        """Return whether it has written its mean since, or has none that would tell."""
        return self.mean is None or self.before is None or not self.before.equal(self.mean)


def _mixing_modules(piece: RangePart) -> list[_Mixing]:
    """Return the modules that mix samples, with their means as they are now."""
    reachable = Reachable(piece.function)
    for given in (*piece.args, *piece.kwargs.values()):
        if isinstance(given, nn.Module):
            reachable.look_into(given)
    named, found = dict(named_modules(reachable.modules)), list[_Mixing]()
    with without_functions():
        for each in coupled_modules(reachable.modules):
            mean = getattr(named[each.name], "running_mean", None)
            # a lazy one that nobody has called has no numbers
            before = None if mean is None or is_lazy(mean) else mean.clone()
            found.append(_Mixing(str(each), mean, before))
    return found


def _warn_of_mixing(name: str, mixing: list[_Mixing]) -> None:
    with without_functions():
        # one that the function does not call, or only in evaluation mode, has written nothing
        found = [each.told for each in mixing if each.has_mixed()]
    if found:
        warn_user(
            f"{name}() was split to fit, and {listed(found, most=6)} gives other results for each "
            "piece than for all at once. To evaluate, call eval() first.",
            AdaptiveUsageWarning,
        )


def _random_state(args: _Args, kwargs: _Kwargs) -> RngState:
    return RngState(generators=generators_in((*args, *kwargs.values())))
