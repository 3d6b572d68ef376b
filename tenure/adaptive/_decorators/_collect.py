"""What becomes of the results of the pieces of a range or of a tensor.

Invariant: a collector gets the result of each piece once, in order, after the attempt that made it
has succeeded; what it refuses by its kind it refuses at the first piece.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from tenure._containers import contents_of, level_of, tensors_in
from tenure._errors import AdaptiveUsageError
from tenure._storages import element_bytes, storage_key
from tenure._text import describe_tensor
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

    def land(self, result: Any) -> Any:
        """Return the part of a result to keep; part of the attempt, and retried with it."""
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

    def land(self, result: Any) -> Any:
        if not self._results:
            _check(result)
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

    def land(self, result: Any) -> Any:
        super().land(result)
        # The one before, now that this one was launched; so only one is pinned.
        self._arrive()
        return Landing(result)

    def add(self, landed: Any) -> None:
        self._coming = landed
        self._note(landed.on_host)

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


def _check(result: Any) -> None:
    """Refuse what can't be concatenated, however many there are.

    Raises:
        AdaptiveUsageError: it is, or holds, something else than tensors with a dimension.
    """
    if isinstance(result, dict | tuple | list):
        for child in contents_of(result):
            _check(child)
    elif not isinstance(result, Tensor):
        raise AdaptiveUsageError(
            f"collect= can't concatenate a result of type {type(result).__name__}. Return tensors "
            "with at least one dimension, or tuples, lists or dicts of them; or give a function of "
            "the list of results."
        )
    elif not result.dim():
        raise AdaptiveUsageError(
            "collect= can't concatenate tensors that have no dimension. Return them with one, as "
            'x[None], or use collect="list".'
        )


def _joined(results: list[Any], dimension: int) -> Any:
    """Tensors along the dimension; tuples, lists and dicts of them entry by entry."""
    first = results[0]
    if other := next((_form(each) for each in results if _form(each) != _form(first)), None):
        raise AdaptiveUsageError(
            f"collect= can't concatenate {_form(first)} and {other}. Return the same structure for "
            "each piece, or give a function of the list of results."
        )
    level = level_of(first) if isinstance(first, dict | tuple | list) else None
    if level is None:
        return _cat(results, dimension)
    # by key: the dicts of two pieces may have their keys in different orders
    entries = [[each[key] for each in results] for key in level.keys]
    return level.make([_joined(entry, dimension) for entry in entries])


def _cat(tensors: list[Tensor], dimension: int) -> Tensor:
    try:
        return torch.cat(tensors, dimension)
    except torch.OutOfMemoryError as error:
        error.add_note(
            "All pieces are done, and their results are joined, for which they need memory twice. "
            'With collect="host" it is memory of the host; collect="list" does not join.'
        )
        raise
    except RuntimeError:
        # the error of torch says "zero-dimensional tensor", and nothing of pieces
        for tensor in tensors:
            _check(tensor)
        # by all sizes but that of the dimension
        rests = [(t.shape[:dimension], t.shape[dimension:][1:]) for t in tensors]
        other = next((t for t, rest in zip(tensors, rests, strict=True) if rest != rests[0]), None)
        if other is None:
            raise
        raise AdaptiveUsageError(
            f"collect= can't concatenate {describe_tensor(tensors[0])} and "
            f"{describe_tensor(other)} along dimension {dimension}: their other sizes differ. Pad "
            "what the function returns to one size, or give a function of the list of results."
        ) from None


def _form(result: Any) -> str:
    if isinstance(result, Tensor):
        return "a tensor"
    if isinstance(result, dict):
        return f"a dict of {', '.join(sorted(map(repr, result))) or 'nothing'}"
    if isinstance(result, tuple | list):
        return f"a tuple or list of {len(result)}"
    return f"a {type(result).__name__}"
