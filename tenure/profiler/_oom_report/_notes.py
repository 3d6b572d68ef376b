"""What is noted while a program runs: backward passes, joins, and parts that modules get.

Invariant: nothing of the program is kept alive: numbers, lines, and weak references.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn
from torch.nn.modules.module import register_module_module_registration_hook

from tenure._callers import user_site
from tenure._heap import is_kind, read
from tenure._storages import storage_of
from tenure._torch.autograd import sequence_number
from tenure._torch.storages import key_of

_MOST_MARKS = 256
_MOST_JOINED = 4096
_MOST_PARTS = 256


class Joined(NamedTuple):
    """A storage that `torch.cat` made of one that it had made before, and so on.

    Attributes:
        storage: the storage.
        times: how often that happened in a row.
        site: the user's line of the last time.
    """

    storage: weakref.ref[UntypedStorage]
    times: int
    site: str


class Notes:
    """The notes of one recorder.

    Attributes:
        marks: for the last backward passes, the number of the node that each began with.
        n_backward: how many backward passes there were.
        retained_at: the line of the last ``backward(retain_graph=True)``; empty without one.
        created_at: the same of ``create_graph=True``.
        joined: what grew by `torch.cat`, by the key of its storage.
        parts: for a module, the numbers of the backward passes before which it got submodules.
    """

    def __init__(self) -> None:
        self.marks: deque[int] = deque(maxlen=_MOST_MARKS)
        self.n_backward = 0
        self.retained_at = ""
        self.created_at = ""
        self.joined: dict[int, Joined] = {}
        self.parts: weakref.WeakKeyDictionary[nn.Module, dict[str, int]] = (
            weakref.WeakKeyDictionary()
        )
        self._hook: Any = None

    def open(self) -> None:
        """Begin to note what modules get."""
        self._hook = register_module_module_registration_hook(self._registered)

    def close(self) -> None:
        """End."""
        self._hook.remove()

    def times_of(self, module: nn.Module) -> dict[str, int]:
        """For each part that a module got, how many backward passes there had been."""
        # a class of the program may have no hash
        with suppress(TypeError):
            return self.parts.get(module, {})
        return {}

    def note(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None, result: Any
    ) -> None:
        """Note one call of a function of `NOTED`."""
        if NOTED[id(func)] == "backward":
            self._ran_backward(args[0] if args else None, kwargs or {})
        elif type(result) is Tensor and not result.requires_grad:
            self._joined(args[0] if args else (kwargs or {}).get("tensors"), result)

    def _ran_backward(self, loss: Any, kwargs: Mapping[str, Any]) -> None:
        self.n_backward += 1
        tensors = loss if type(loss) in (tuple, list) else (loss,)
        for t in tensors:
            node = read(t, "grad_fn") if is_kind(type(t), Tensor) else None
            number = None if node is None else sequence_number(node)
            if number is not None:
                self.marks.append(number)
        if kwargs.get("retain_graph"):
            self.retained_at = str(user_site())
        if kwargs.get("create_graph"):
            self.created_at = str(user_site())

    def _joined(self, operands: Any, result: Tensor) -> None:
        operands = operands if type(operands) in (tuple, list) else ()
        tensors = [t for t in operands if is_kind(type(t), Tensor)]
        largest = max(tensors, key=lambda t: t.numel(), default=None)
        # a part that is added to a larger whole, and not several that are joined once
        if largest is None or 2 * largest.numel() < result.numel():
            return
        before, after = storage_of(largest), storage_of(result)
        if before is None or after is None:
            return
        known = self.joined.get(key_of(before))
        times = known.times if known is not None and known.storage() is before else 0
        if len(self.joined) >= _MOST_JOINED:
            self.joined = {k: each for k, each in self.joined.items() if each.storage() is not None}
        if len(self.joined) < _MOST_JOINED:
            self.joined[key_of(after)] = Joined(weakref.ref(after), times + 1, str(user_site()))

    def _registered(self, module: nn.Module, name: str, part: nn.Module | None) -> None:
        with suppress(TypeError):
            parts = self.parts.setdefault(module, {})
            if len(parts) < _MOST_PARTS:
                parts[name] = self.n_backward


NOTED: dict[int, str] = {
    **{id(func): "join" for func in (torch.cat, torch.concat, torch.hstack, torch.vstack)},
    **{id(func): "backward" for func in (Tensor.backward, torch.autograd.grad)},
}
"""The functions that are noted, by identity: any object may be called as a function of torch."""
