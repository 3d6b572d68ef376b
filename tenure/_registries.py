"""Lists of those who give device memory back, name tensors, or are told of scopes and errors.

Invariant: being registered keeps nothing alive, and asking never raises for one of those asked.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from types import FrameType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

from torch import Tensor, UntypedStorage, nn

_Member = TypeVar("_Member")

_logger = logging.getLogger("tenure")


class NamedTensor(NamedTuple):
    """A tensor with a storage of its own, and what a report of memory calls it.

    Attributes:
        tensor: it shows all bytes of its storage.
        name: what it is to the model that it serves.
        category: what its bytes count as, beside parameters, buffers and so on.
        inside: other storages whose bytes are counted with these, or with several such as these:
            what lies in them, and what they lie in.
    """

    tensor: Tensor
    name: str
    category: str
    inside: tuple[UntypedStorage, ...] = ()


class TensorNamer(Protocol):
    """What keeps memory for a model, and can say what for."""

    def served_model(self) -> nn.Module | None:
        """Return the model that the memory is for; None when that is gone."""
        ...

    def named_tensors(self) -> Iterable[NamedTensor]:
        """Yield the tensors that it keeps. Called on any thread, never inside an operation."""
        ...


@runtime_checkable
class Shrinkable(Protocol):
    """What holds device memory that it can do without, at a price."""

    def shrink(self, device: str | None, n_bytes: int | None) -> int:
        """Give back device memory, if possible at once as much as is wanted.

        Called on the thread that ran out of memory, outside of any operation.

        Args:
            device: where memory is short, as torch spells it; ``"cuda"`` where the index is not
                known, None where the device is not.
            n_bytes: bytes that would help; None where that is not known.

        Returns:
            The bytes given back on that device; 0 when there is nothing left to give, and from
            then on.
        """
        ...


class ScopeWatcher(Protocol):
    """Who is told of scopes, on whatever thread they are; it must not raise."""

    def began(self, scope: object) -> None:
        """Note that a scope has become the current one."""
        ...

    def ended(self, scope: object) -> None:
        """Note that a scope is not the current one; called again when it has freed its tensors."""
        ...


class _Registry(Generic[_Member]):
    """Objects for as long as they live, the first first."""

    def __init__(self) -> None:
        self._members: weakref.WeakValueDictionary[int, _Member] = weakref.WeakValueDictionary()

    def add(self, member: _Member) -> None:
        """Ask this one from now on, as long as it is alive."""
        self._members.setdefault(id(member), member)

    def discard(self, member: _Member) -> None:
        """Ask it no more; one that is not registered is ignored."""
        self._members.pop(id(member), None)

    def alive(self) -> list[_Member]:
        """Return all that are registered and alive."""
        # the list of references is made in one go: other threads may register more meanwhile
        references = self._members.valuerefs()
        return [member for each in references if (member := each()) is not None]


shrinkables: _Registry[Shrinkable] = _Registry()
"""Who is asked for memory when it is short."""
namers: _Registry[TensorNamer] = _Registry()
"""Whose tensors are named in reports."""
scope_watchers: list[ScopeWatcher] = []
"""Who is told which scopes are current; mostly nobody."""
refusal_watchers: list[Callable[[str], None]] = []
"""Who is told, with its text, that tenure itself raises an out-of-memory error; mostly nobody."""
retry_watchers: list[Callable[[BaseException], object]] = []
"""Functions to call with an out-of-memory error of its work that a retry caught; mostly none."""
leak_watchers: list[Callable[[Any], None]] = []
"""What is given the report of each scope that tensors outlived, as it is logged."""
ended_frames: list[FrameType] = []
"""Frames that have ended, and whose variables are still named as if they ran; mostly none."""
handles_ooms: ContextVar[bool] = ContextVar("tenure_handles_ooms", default=False)
"""Whether what runs is tried again, smaller, when it runs out of memory: no error that is news."""
gradients_aside: ContextVar[bool] = ContextVar("tenure_gradients_aside", default=False)
"""Whether gradients of before stand elsewhere than in ``.grad``, beside those that are made now."""


def ask_to_shrink(device: str | None, n_bytes: int | None) -> int:
    """Ask one after the other until ``n_bytes`` have been given back.

    Returns:
        The bytes given back in all.
    """
    given_bytes = 0
    for shrinkable in shrinkables.alive():
        if n_bytes is not None and given_bytes >= n_bytes:
            break
        wanted_bytes = None if n_bytes is None else n_bytes - given_bytes
        given_bytes += _ask(shrinkable, device, wanted_bytes)
    return given_bytes


def _ask(shrinkable: Shrinkable, device: str | None, n_bytes: int | None) -> int:
    try:
        return max(0, shrinkable.shrink(device, n_bytes))
    # whoever asks has an error of its own to handle, which one broken cache must not replace
    except Exception:
        _logger.warning("%r could not give memory back.", shrinkable, exc_info=True)
        return 0
