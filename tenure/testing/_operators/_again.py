"""Running a call once more over the same bytes, as a graph does that recorded it."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from .._device._bytes import POISON, bytes_in
from .._torch_backend import tensor_key


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


def poison(result: Any, arguments: set[int]) -> None:
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
