"""What becomes of the results of the pieces of a range or of a tensor.

Invariant: a collector gets the result of each piece once, in order, after the attempt that made it
has succeeded; what it refuses by its kind it refuses at the first piece.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from tenure._containers import level_of, tensors_in
from tenure._errors import AdaptiveUsageError
from tenure._storages import element_bytes, storage_key
from tenure._torch.quiet import without_functions
from tenure._torch.writes import counter_of
from tenure.scopes import persist

from ._landing import Landing


@runtime_checkable
class Reducer(Protocol):
    """What takes one result after the other: a metric, for one."""

    def update(self, *args: Any, **kwargs: Any) -> object:
        """Take a result."""


Collect = Literal["list", "cat", "host"] | Reducer | Callable[[list[Any]], Any]


_PILED_UP = (
    "Not even 1 fits beside the results of the pieces before, which collect= keeps where they are: "
    'collect="host" takes each from an accelerator, and a metric keeps none. Else free memory, '
    "make the model or the sample smaller, or page the model."
)


class _Extent(NamedTuple):
    """Where a tensor of a result lies; sorted, those that overlap are neighbours.

    Attributes:
        storage: the identity of its storage.
        begin: the first of its bytes there.
        end: the byte after the last.
        written: how often it had been written; of an inference tensor, which object it is.
        piece: the number of the piece that it is a result of.
    """

    storage: int
    begin: int
    end: int
    written: int
    piece: int

    def is_overwritten_by(self, other: _Extent) -> bool:
        """Return whether another piece has written where it lies, if it stands before that."""
        is_shared = self.storage == other.storage and other.begin < self.end
        return is_shared and self.piece != other.piece and self.written != other.written


class Collector:
    """Takes the results of the pieces of one call, and gives a function the list of them.

    Args:
        join: the function.

    Attributes:
        advice: what to do where no piece fits beside the results kept; None: they leave the device.
        needs_one: whether it needs a result of an empty piece if there is no other.
    """

    advice: str | None = _PILED_UP
    needs_one = False

    def __init__(self, join: Callable[[list[Any]], Any] = list) -> None:
        self._join = join
        self._results: list[Any] = []
        self._extents: list[_Extent] = []

    def land(self, result: Any, rows: range, dimension: int) -> Any:
        """Return the part of a result to keep; part of the attempt, and retried with it.

        Args:
            result: what the function returned.
            rows: the piece that it is of.
            dimension: along which results are joined.
        """
        return result

    def add(self, landed: Any) -> None:
        """Take what has landed: its attempt has succeeded."""
        self._results.append(landed)
        self._note(tensors_in([landed]))

    def collected(self, dimension: int) -> Any:
        """Return the joined results that were split along a dimension.

        Raises:
            AdaptiveUsageError: a piece has written over the result of an earlier one.
        """
        self._refuse_overwritten()
        return self._join(self._results)

    def _note(self, tensors: Iterable[Tensor]) -> None:
        """Note where a result is kept as it is, in memory that later pieces may write."""
        with without_functions():
            for tensor in tensors:
                if type(tensor) is not Tensor or tensor.layout is not torch.strided:
                    continue
                storage, n_bytes = storage_key(tensor), element_bytes(tensor)
                if storage is not None and n_bytes and tensor.is_contiguous():
                    begin = int(tensor.storage_offset()) * tensor.element_size()
                    # writes of an inference tensor are not counted: each object is a result anew
                    written = id(tensor) if tensor.is_inference() else counter_of(tensor)
                    piece = len(self._results)
                    self._extents.append(_Extent(storage, begin, begin + n_bytes, written, piece))

    def _refuse_overwritten(self) -> None:
        for one, other in itertools.pairwise(sorted(self._extents)):
            if one.is_overwritten_by(other):
                raise AdaptiveUsageError(
                    "collect= got results of two pieces in the same memory, so the later piece has "
                    "written over the earlier one. Return a tensor of its own for each piece, such "
                    "as buffer[:n].clone()."
                )


def collector_for(collect: Collect | None) -> Callable[[], Collector] | None:
    """Return the collector of a call's results; None if results are dropped.

    Raises:
        AdaptiveUsageError: ``collect`` is none of its values.
    """
    # let go one by one: a list of them would hold the memory that the pieces are to save
    if collect is None:
        return None
    # not by ==, which of metrics makes another metric
    if isinstance(collect, str):
        if collect in _NAMED:
            return _NAMED[collect]
    elif isinstance(collect, type) and hasattr(collect, "update") and hasattr(collect, "compute"):
        raise AdaptiveUsageError(
            f"collect={collect.__name__} is a class. Give an object of it, as in "
            f"collect={collect.__name__}(), which you ask for the result yourself."
        )
    # a metric can be called too, and would compute something at each result
    elif isinstance(collect, Reducer) and not isinstance(collect, type):
        return functools.partial(_Reduced, collect)
    elif callable(collect):
        return functools.partial(Collector, collect)
    raise AdaptiveUsageError(
        f'collect={collect!r} is none of "list", "cat", "host", a function of the list of results, '
        "an object with an update() method, or None."
    )


class _Concatenated(Collector):
    """The results are put together where they are."""

    needs_one = True

    def __init__(self) -> None:
        super().__init__()
        self._first: _Piece | None = None

    def land(self, result: Any, rows: range, dimension: int) -> Any:
        piece = _Piece(rows, _shapes_in(result))
        # the first may be tried again
        if self._first is None or self._first.rows.start == rows.start:
            self._first = piece
        _check_alike(self._first, piece, dimension)
        return result

    def collected(self, dimension: int) -> Any:
        self._refuse_overwritten()
        return _joined(self._results, dimension)


class _OnHost(_Concatenated):
    """The results are put together on the host, where each is brought while the next is made."""

    advice = None

    def __init__(self) -> None:
        super().__init__()
        self._coming: Landing | None = None

    def land(self, result: Any, rows: range, dimension: int) -> Any:
        super().land(result, rows, dimension)
        # The one before, now that this one was launched; so only one is pinned.
        self._arrive()
        return Landing(result)

    def add(self, landed: Any) -> None:
        self._coming = landed
        self._note(landed.on_host)
        # of a device that is the host nothing is taken away
        self.advice = _PILED_UP if landed.on_host and not landed.copies else None

    def collected(self, dimension: int) -> Any:
        self._arrive()
        return super().collected(dimension)

    def _arrive(self) -> None:
        # where the host has no room for it, it comes with the next attempt
        if self._coming is not None:
            self._results.append(self._coming.landed())
            self._coming = None


class _Reduced(Collector):
    """The results go into an object of the user's, which outlives the call."""

    advice = None

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer

    def add(self, landed: Any) -> None:
        # What it makes is a part of itself: a scope of this call would dispose of that.
        with persist():
            if isinstance(landed, tuple):
                self._reducer.update(*landed)
            elif isinstance(landed, dict):
                self._reducer.update(**landed)
            else:
                self._reducer.update(landed)

    def collected(self, dimension: int) -> Any:
        return self._reducer


_NAMED: dict[str, Callable[[], Collector]] = {
    "list": Collector,
    "cat": _Concatenated,
    "host": _OnHost,
}


class _Piece(NamedTuple):
    """The form of the result of a piece.

    Attributes:
        rows: the piece.
        shapes: of each tensor by its place in the result; "None" for None.
    """

    rows: range
    shapes: dict[str, Sequence[Any]]


def _shapes_in(result: Any, place: str = "result") -> dict[str, Sequence[Any]]:
    """Return the shapes of the tensors of a result by place.

    Raises:
        AdaptiveUsageError: it is, or holds, something else than tensors and None.
    """
    level = level_of(result) if isinstance(result, dict | tuple | list) else None
    if level is not None:
        found: dict[str, Sequence[Any]] = {}
        for key, child in zip(level.keys, level.children, strict=True):
            found |= _shapes_in(child, f"{place}[{key!r}]")
        return found
    if isinstance(result, Tensor):
        return {place: [*result.shape]}
    # models return it for what was not asked for; alone it is a return that was forgotten
    if result is None and place != "result":
        return {place: "None"}
    raise AdaptiveUsageError(
        f"collect= can't concatenate a result of type {type(result).__name__}. Return tensors, or "
        "tuples, lists or dicts of them; or give a function of the list of results."
    )


def _check_alike(first: _Piece, piece: _Piece, dimension: int) -> None:
    """Refuse a result that would not be joined with the first one along its rows."""
    lengths = len(first.rows), len(piece.rows)
    rows = [f"{each.rows.start} to {each.rows.stop}" for each in (first, piece)]
    for place in first.shapes | piece.shapes:
        one, two = (each.shapes.get(place, "nothing") for each in (first, piece))
        if isinstance(two, list) and len(two) <= dimension:
            raise AdaptiveUsageError(
                f"collect= joins results along dimension {dimension}, and {place} of rows "
                f"{rows[1]} is a tensor of {two}. Return it with that dimension, as x[None], or "
                'use collect="list".'
            )
        rests = [(len(shape), shape[:dimension], shape[dimension + 1 :]) for shape in (one, two)]
        # torch skips an empty tensor of one dimension
        fits = rests[0] == rests[1] or [0] in (one, two)
        sizes = zip(one, two, strict=False)
        rows_at = [at for at, both in enumerate(sizes) if at != dimension and both == lengths]
        # pieces of one size fit all the same; a multiple may be several rows for each sample
        is_turned = rows_at and one == two and one[dimension] % lengths[0]
        if piece is first or (fits and not is_turned):
            continue
        advice = "with the same structure, and padded to one size"
        if rows_at:
            advice = f"with rows first, as by movedim({rows_at[0]}, {dimension})"
        raise AdaptiveUsageError(
            f"collect= can't join results along dimension {dimension}: {place} of rows {rows[0]} "
            f"is {one}, and of rows {rows[1]} {two}. Return tensors {advice}; or give a function "
            "of the list of results."
        )


def _joined(results: list[Any], dimension: int) -> Any:
    """Tensors along the dimension; tuples, lists and dicts of them entry by entry."""
    first = results[0]
    level = level_of(first) if isinstance(first, dict | tuple | list) else None
    if level is not None:
        # by key: the dicts of two pieces may have their keys in different orders
        entries = [[each[key] for each in results] for key in level.keys]
        return level.make([_joined(entry, dimension) for entry in entries])
    try:
        return None if first is None else torch.cat(results, dimension)
    except torch.OutOfMemoryError as error:
        error.add_note(
            "All pieces are done, and their results are joined, for which they need memory twice. "
            'With collect="host" it is memory of the host; collect="list" does not join.'
        )
        raise
