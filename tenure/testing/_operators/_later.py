"""Calls that run once more: as a late kernel over true bytes, or as a graph that recorded them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from .._device._blocks import is_on_device, true_bytes_of
from .._device._host_memory import POISON, bytes_in, bytes_of
from .._device._late import Later, touch
from .._device._machine import DeviceRandom
from .._torch_backend import tensor_key

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


def again(run: Callable[[], Any], result: Any, arguments: set[int]) -> Callable[[Any], None]:
    """A function that calls `run` again and puts what it makes where `result` lies.

    Args:
        run: the call.
        result: what it returned the first time.
        arguments: the keys of the storages that are no results: what is in them, `run` writes.
    """
    targets = dict(new_storages(result, arguments))

    def repeat(_stream: Any) -> None:
        for index, made in new_storages(run(), arguments):
            bytes_in(targets[index]).copy_(bytes_in(made))

    return repeat


def poison_results(result: Any, arguments: set[int]) -> None:
    """Make what a call returned into the bytes of memory that nothing has written."""
    for _, storage in new_storages(result, arguments):
        bytes_in(storage).fill_(POISON)


def new_storages(result: Any, arguments: set[int]) -> Iterator[tuple[int, torch.UntypedStorage]]:
    """What a result lies in and no argument, once each, by its place in the result."""
    seen = set(arguments)
    items = result if isinstance(result, (list, tuple)) else [result]
    for index, item in enumerate(items):
        if isinstance(item, torch.Tensor) and tensor_key(item) not in seen:
            seen.add(tensor_key(item))
            yield index, item.untyped_storage()
