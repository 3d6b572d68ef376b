"""An exact count of the bytes that a stretch of code has made and that are still alive.

Each storage that an operation of torch returns is noted once, through a weak reference that keeps
nothing alive; so memory that only autograd holds counts, and memory that nobody holds does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """A block whose storages are counted as long as they live; on any device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch left it unannotated
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def total(self) -> int:
        """The bytes of the storages made inside that are alive now."""
        alive = {key: item for key, item in self._storages.items() if not item[0].expired()}
        self._storages = alive
        return sum(n_bytes for _, n_bytes in alive.values())

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation and note what it returns."""
        result = func(*args, **(kwargs or {}))
        known = _storages_in((args, kwargs)).keys() | self._storages.keys()
        for key, storage in _storages_in(result).items():
            if key not in known:
                self._storages[key] = StorageWeakRef(storage), storage.nbytes()
        return result


def _storages_in(tree: object) -> dict[int, UntypedStorage]:
    tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
    return {storage._cdata: storage for storage in (t.untyped_storage() for t in tensors)}
