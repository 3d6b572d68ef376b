"""The counters of a thread: what its scopes took, let go and handed out."""

from __future__ import annotations

from ._thread import ThreadScopes, this_thread

_COUNTERS = (
    "created_in_scope",
    "disposed_in_scope",
    "released_in_scope",
    "attached_to_scope",
    "detached_from_scope",
    "disposed_outside_scope",
)


class ScopeStatistics:
    """The counters of one thread, always up to date.

    Attributes:
        created_in_scope: tensors made while a scope was current, and owned by it.
        disposed_in_scope: tensors disposed while a scope owned them, or by its end.
        released_in_scope: tensors that died of their own accord (by reference counting) while a
            scope owned them.
        attached_to_scope: tensors without an owner that got one.
        detached_from_scope: tensors that went on without an owner.
        disposed_outside_scope: tensors disposed that no scope owned.
        live: tensors, of those a scope of this thread owns or handed out, that are alive now.

    Source: the thread statistics of TorchSharp's dispose scopes; its disposed count is the sum of
    disposed and released here, because Python counts references.
    """

    created_in_scope: int
    disposed_in_scope: int
    released_in_scope: int
    attached_to_scope: int
    detached_from_scope: int
    disposed_outside_scope: int

    def __init__(self, thread: ThreadScopes) -> None:
        self._thread = thread

    def __getattr__(self, name: str) -> int:
        if name not in _COUNTERS:
            raise AttributeError(f"ScopeStatistics has no counter {name!r}; it has {_COUNTERS}.")
        return _counts(self._thread)[name] - self._thread.counts_at_reset.get(name, 0)

    @property
    def live(self) -> int:
        """Tensors, of those a scope of this thread owns or handed out, that are alive now."""
        return self._thread.live

    def reset(self) -> None:
        """Count from zero again; ``live`` is no counter, and stays."""
        self._thread.counts_at_reset = _counts(self._thread)

    def as_dict(self) -> dict[str, int]:
        """The counters of this moment, by name."""
        return {name: getattr(self, name) for name in (*_COUNTERS, "live")}

    def __str__(self) -> str:
        return "; ".join(f"{name}: {count}" for name, count in self.as_dict().items())

    def __repr__(self) -> str:
        return f"<ScopeStatistics {self}>"


def statistics() -> ScopeStatistics:
    """The counters of the calling thread.

    Example:
        >>> import torch
        >>> from tenure import NewDisposeScope, statistics
        >>> statistics().reset()
        >>> with NewDisposeScope():
        ...     kept = torch.ones(3) + 1
        >>> print(statistics())  # doctest: +NORMALIZE_WHITESPACE, +ELLIPSIS
        created_in_scope: 2; disposed_in_scope: 1; released_in_scope: 1; attached_to_scope: 0;
        detached_from_scope: 0; disposed_outside_scope: 0; live: ...
    """
    return ScopeStatistics(this_thread())


def _counts(thread: ThreadScopes) -> dict[str, int]:
    created = thread.tracker.created
    gone = created + thread.attached - thread.detached - thread.disposed - thread.n_owned
    return {
        "created_in_scope": created,
        "disposed_in_scope": thread.disposed,
        "released_in_scope": gone,
        "attached_to_scope": thread.attached,
        "detached_from_scope": thread.detached,
        "disposed_outside_scope": thread.disposed_outside,
    }
