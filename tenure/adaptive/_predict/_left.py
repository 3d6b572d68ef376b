"""Tensors without data that outlive a prediction: removed from caches, or named in an error.

Invariant: a prediction that leaves none costs no look at the heap.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any
from weakref import ref

from torch import Tensor

from tenure._errors import PredictionError
from tenure._heap import find_holders, instances, tracked_objects
from tenure._text import describe_tensor, listed
from tenure._torch.fakes import FakeTensor, mode_of
from tenure.scopes import dispose

from .._undo import Caches


class FakesLeft:
    """The tensors without data that a prediction makes and somebody keeps.

    Args:
        mode: what makes them.
        objects: what the work uses.
        has_others: whether the mode has made some before.
    """

    def __init__(self, mode: Any, objects: Iterable[Any], *, has_others: bool) -> None:
        # each of its tensors holds it: once it is gone, so are they
        self._mode = ref(mode)
        self._others: dict[int, Tensor] = {}
        if has_others:
            self._others = {id(each): each for each in self._alive()}
        self._caches = Caches(objects)

    def take_out(self, error: BaseException | None = None) -> bool:
        """Take them out of the caches that they are in; False where somewhere else holds one.

        Args:
            error: what is on its way; its traceback may hold some.
        """
        left = self._alive()
        if not left:
            return True
        is_elsewhere = self._caches.take_out(left)
        del left
        if error is not None and not (is_elsewhere and isinstance(error, Exception)):
            return True
        # some may wait in cycles
        if self._alive():
            gc.collect()
        return not self._alive()

    def _alive(self) -> list[Tensor]:
        # torch makes small cycles around the mode for each operation
        if self._mode() is not None:
            gc.collect(1)
        mode = self._mode()
        if mode is None:
            return []
        fakes = instances(tracked_objects(), FakeTensor)
        return [each for each in fakes if mode_of(each) is mode and id(each) not in self._others]

    def error(self) -> PredictionError:
        """Return the error about those that are left, which are disposed."""
        left = self._alive()
        chains = {found[0].chain: None for found in find_holders(left, ignore=(left,)) if found}
        what = describe_tensor(left[0])
        # used by mistake, each is to say so, instead of training with it in silence
        dispose(left)
        return PredictionError(
            "The memory of this work can't be predicted: it keeps what it computes for later calls "
            f"in {listed([*chains] or ['an unknown object'], most=3)}, which now holds a tensor "
            f"without data ({what}), and what it held before is not known. Nothing else was "
            "changed. Remove the tensor there. Then run the work once with real data of the same "
            "sizes before you predict, or keep the tensor as an attribute of a module."
        )
