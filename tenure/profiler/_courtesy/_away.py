"""One storage while its bytes are in host memory, and the handles that refuse every use meanwhile.

The storage stays the same object, so views, ties, graphs and versions need no change. Its bytes are
at any moment on the device, in host memory, or on both, unless the storage itself has died.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.nn import Parameter

from tenure._containers import passed_tensors
from tenure._errors import AwayTensorError
from tenure._heap import type_name
from tenure._text import describe, format_bytes, operation_of, shape_of
from tenure._torch import trap
from tenure._torch.quiet import set_class, without_functions, without_subclass_functions

_TRAP = "its bytes are in host memory: leave the block of tenure's Courtesy, or call its restore()."
_GUARD = "_tenure_away"
_ADVICE = (
    "Leave the block of the Courtesy, or call restore() on it (the attribute courtesy of this "
    "error), before it is used."
)
# The handle itself knows these. Anything else reads bytes, or returns a view that could.
_PROPERTIES = (
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "retains_grad",
    "grad_fn", "_version", "_base", "nbytes", "itemsize", "is_cuda", "is_sparse", "grad",
)  # fmt: skip
_METHODS = (
    "size", "stride", "dim", "numel", "element_size", "storage_offset", "is_contiguous",
    "is_floating_point", "is_complex", "get_device", "__len__", "__dir__", "__hash__",
)  # fmt: skip
_GRADIENT: Any = Tensor.grad
_READABLE = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
        *(getattr(Tensor, name) for name in _METHODS),
        # a gradient can be freed meanwhile, as zero_grad() does
        _GRADIENT.__set__,
        _GRADIENT.__delete__,
    }
)
_SPELLING = frozenset({Tensor.__repr__, Tensor.__format__})

all_away: weakref.WeakKeyDictionary[UntypedStorage, Away] = weakref.WeakKeyDictionary()
"""Storages that are away: they must come back, even if nobody keeps their Courtesy. If one dies
meanwhile, its bytes are freed with it."""


class Away:
    """The bytes of a storage in host memory.

    Args:
        courtesy: the Courtesy that moves it.
        holding: the storage and all that shares it.
        host: uint8[n_bytes], the bytes of the storage; None once they are not needed any more.
    """

    def __init__(self, courtesy: Any, holding: Any, host: Tensor) -> None:
        self.courtesy = courtesy
        self.host: Tensor | None = host
        self.n_bytes = host.numel()
        self.n_tensors = len(holding.tensors)
        self.device = holding.storage.device
        self._hooks: list[Any] = []
        self._handles = [weakref.ref(handle) for handle in holding.tensors.values()]

    def __str__(self) -> str:
        return f"{format_bytes(self.n_bytes)} on {self.device}"

    def leave(self, holding: Any) -> None:
        """Make every use raise an error, then free the device memory."""
        # First: an interrupt in the middle of this must find it.
        all_away[holding.storage] = self
        # Handles first, nodes next, memory last: whatever fails between, no use reads freed bytes.
        for handle in holding.tensors.values():
            _attributes(handle)[_GUARD] = type(handle), self
            set_class(handle, AwayTensor)
        for node in holding.nodes.values():
            # Weakly: the graph would keep the bytes in host memory as long as it lives.
            refusal = partial(_refuse_backward, weakref.ref(self), type_name(type(node)))
            self._hooks.append(node.register_prehook(refusal))
        holding.storage.resize_(0)
        # C++ that has a pointer passes Python by: the empty storage itself refuses.
        trap.arm(holding.storage, f"{self}: {_TRAP}")

    def allocate(self, storage: UntypedStorage) -> None:
        """Give the storage its memory back, whose bytes are undefined yet.

        Raises:
            RuntimeError: there is no memory for it, and it stays as it was.
        """
        # An interrupted call may have come this far.
        if storage.nbytes() != self.n_bytes:
            trap.disarm(storage)
            try:
                storage.resize_(self.n_bytes)
            # Out of memory, or an interrupt: it is away still, and must refuse as before.
            except BaseException:
                trap.arm(storage, f"{self}: {_TRAP}")
                raise

    def come_back(self, storage: UntypedStorage) -> None:
        """Let the tensors and graphs be used again, with the bytes they had."""
        # Without bytes of the host it is back, and an interrupt came before all tensors knew.
        if self.host is not None:
            bytes_in(storage).copy_(self.host)
        # before any tensor can be written to: these bytes must not come a second time
        self.host = None
        for hook in self._hooks:
            hook.remove()
        for reference in self._handles:
            handle = reference()
            if type(handle) is AwayTensor:
                set_class(handle, _attributes(handle)[_GUARD][0])
                del _attributes(handle)[_GUARD]
        all_away.pop(storage, None)


@contextmanager
def settled(device: torch.device) -> Iterator[None]:
    """Open a block on the default stream, with all work done before and after it.

    Without it a storage would return to the stream that happens to be current.
    """
    module: Any = torch.get_device_module(device)
    with ExitStack() as stack:
        if hasattr(module, "default_stream"):
            # Else the end of stream() turns to the device that was current, and makes a context.
            stack.enter_context(module.device(device.index))
            stack.enter_context(module.stream(module.default_stream(device)))
        module.synchronize(device)
        yield
        module.synchronize(device)


def bytes_in(storage: UntypedStorage) -> Tensor:
    """uint8[n_bytes] over a storage."""
    empty: Any = torch.empty(0, dtype=torch.uint8, device=storage.device)
    over: Tensor = empty.set_(storage)
    return over


def _refuse_backward(reference: weakref.ref[Away], node: str, _: tuple[Tensor, ...]) -> None:
    away = reference()
    if away is not None and away.host is not None:
        raise AwayTensorError(
            f"backward() came to {node}, which saved a tensor of {away} that a Courtesy moved to "
            f"host memory. {_ADVICE}",
            away.courtesy,
        )


class AwayTensor(Tensor):
    """The class of a handle while its bytes are in host memory. Users never make one."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer what the handle knows, and refuse everything else until its bytes are back."""
        if func in _READABLE:
            with without_subclass_functions():
                return func(*args, **(kwargs or {}))
        tensor = next(t for t in passed_tensors((args, kwargs)) if type(t) is AwayTensor)
        _, away = _attributes(tensor)[_GUARD]
        with without_functions():
            text = describe(tensor.dtype, shape_of(tensor), tensor.device, away.n_bytes)
        text += ", which a Courtesy moved to host memory"
        if func in _SPELLING:
            return f"<AwayTensor {text}>"
        raise AwayTensorError(f"{operation_of(func)} got {text}. {_ADVICE}", away.courtesy)

    @property
    def _is_param(self) -> bool:  # type: ignore[override]  # torch declares it as an attribute
        """What ``isinstance(t, torch.nn.Parameter)`` asks."""
        attributes = _attributes(self)
        return issubclass(attributes[_GUARD][0], Parameter) or bool(attributes.get("_is_param"))


def _attributes(tensor: Tensor) -> dict[str, Any]:
    attributes: dict[str, Any] = object.__getattribute__(tensor, "__dict__")
    return attributes
