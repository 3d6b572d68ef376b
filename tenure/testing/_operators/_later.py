"""Calls as late kernels: the same call over the true bytes of its arguments, to be run later."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from .._device._blocks import is_on_device, true_bytes_of
from .._device._bytes import POISON, bytes_in, bytes_of
from .._device._generator import DeviceRandom
from .._device._late import Later, touch
from .._torch_backend import tensor_key
from ._again import new_storages

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


class CallLater:
    """A call with its arguments as they are at the launch, and true bytes for those on the device.

    Args:
        pairs: each argument on the device with the host tensor that the call was given for it.
        written: which of these host tensors the call writes.
        args: what the call was given.
        kwargs: likewise, by name.
        random: what it draws from; None if it draws nothing.
    """

    def __init__(
        self,
        pairs: Pairs,
        written: list[torch.Tensor],
        args: list[Any],
        kwargs: dict[str, Any],
        random: DeviceRandom | None,
    ) -> None:
        ids = {id(each) for each in written}
        self._true = {id(expected): true_bytes_of(tensor) for tensor, expected in pairs}
        self._writes = [self._true[id(alias)] for _, alias in pairs if id(alias) in ids]
        self._touches = [
            touch(self._true[id(alias)], is_write=id(alias) in ids) for _, alias in pairs
        ]
        self._again = None if random is None else partial(random.drawing_again, random.state())
        self._arguments = {tensor_key(alias) for _, alias in pairs}
        self._args = [self._argument(value) for value in args]
        self._kwargs = {name: self._argument(value) for name, value in kwargs.items()}

    def work(
        self,
        name: str,
        function: Callable[..., Any],
        expected: Any,
        result: Any,
    ) -> Later:
        """The work, once the call has been made with what was expected.

        Args:
            name: the operator.
            function: what was called.
            expected: what the call gave on the host.
            result: the same on the device.
        """
        items = result if isinstance(result, (list, tuple)) else [result]
        targets = {
            index: true_bytes_of(items[index])
            for index, _ in new_storages(expected, self._arguments)
            if is_on_device(items[index])
        }
        true_arguments = {tensor_key(true) for true in self._true.values()}
        args, kwargs, writes, random = self._args, self._kwargs, self._writes, self._again

        def run() -> None:
            with nullcontext() if random is None else random():
                made = function(*args, **kwargs)
            for index, storage in new_storages(made, true_arguments):
                if index in targets:
                    bytes_in(targets[index].untyped_storage()).copy_(bytes_in(storage))

        def poison() -> None:
            for true in (*writes, *targets.values()):
                bytes_of(true).fill_(POISON)

        touches = (*self._touches, *(touch(true, is_write=True) for true in targets.values()))
        return Later(name, run, touches, poison)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._true[id(value)] if id(value) in self._true else value.clone()
        if isinstance(value, torch.Generator):
            return value.clone_state()
        if isinstance(value, (list, tuple)):
            return [self._argument(item) for item in value]
        return value
