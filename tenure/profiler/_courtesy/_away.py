"""One storage while its bytes are in host memory, and the handles that refuse every use meanwhile.

The storage stays the same object, so views, ties, graphs and versions need no change. Its bytes are
at any moment on the device, in host memory, or on both, unless the storage itself has died.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

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
    "grad_fn", "output_nr", "_version", "_base", "nbytes", "itemsize",
    "is_cuda", "is_cpu", "is_xpu", "is_mps", "is_meta", "is_sparse", "is_sparse_csr",
    "is_quantized", "is_mkldnn", "is_nested", "_backward_hooks", "grad",
)  # fmt: skip
_METHODS = (
    "size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "storage_offset",
    "is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_conj", "is_neg",
    "is_inference", "get_device", "__len__", "__dir__", "__hash__", "_is_view",
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


class Away:
    """The bytes of a storage in host memory.

    Args:
        courtesy: the Courtesy that moves it, whose ``_forget`` is called once it is back or dead.
        holding: the storage and all that shares it.
        host: uint8[n_bytes], the bytes of the storage; None when they are not needed any more.
    """

    def __init__(self, courtesy: Any, holding: Any, host: Tensor) -> None:
        self.courtesy = courtesy
        self.host: Tensor | None = host
        self.n_bytes = host.numel()
        self.n_tensors = len(holding.tensors)
        self.device = holding.storage.device
        self._hooks: list[Any] = []
        self._handles = [weakref.ref(handle) for handle in holding.tensors.values()]
        self._storage = weakref.ref(holding.storage, partial(_forget, weakref.ref(self)))

    def __str__(self) -> str:
        return f"{format_bytes(self.n_bytes)} on {self.device}"

    def leave(self, holding: Any) -> None:
        """Make every use raise an error, then free the device memory."""
        # Handles first, nodes next, memory last: whatever fails between, no use reads freed bytes;
        # see test_an_interrupt_while_leaving_brings_back_what_had_left.
        for handle in holding.tensors.values():
            cls = type(handle)
            set_class(handle, AwayTensor)
            _attributes(handle)[_GUARD] = cls, self
        for node in holding.nodes.values():
            # Weakly: the graph would keep the bytes in host memory as long as it lives.
            refusal = partial(_refuse_backward, weakref.ref(self), type_name(type(node)))
            self._hooks.append(node.register_prehook(refusal))
        holding.storage.resize_(0)
        # C++ that has a pointer passes Python by: the empty storage itself refuses. See
        # test_what_passes_python_by_is_trapped_meanwhile.
        trap.arm(holding.storage, f"{self}: {_TRAP}")

    def allocate(self) -> UntypedStorage | None:
        """Give the storage its memory back, whose bytes are undefined yet; None if it has died.

        Raises:
            RuntimeError: there is no memory for it, and it stays as it was.
        """
        storage = self._storage()
        # An earlier restore() may have come this far, and failed in the copies.
        if storage is not None and storage.nbytes() != self.n_bytes:
            trap.disarm(storage)
            try:
                storage.resize_(self.n_bytes)
            # Out of memory, or an interrupt: it is away still, and must refuse as before.
            except BaseException:
                trap.arm(storage, f"{self}: {_TRAP}")
                raise
        return storage

    def come_back(self) -> None:
        """Let the tensors and graphs be used again; the storage has its bytes."""
        self.host = None
        for hook in self._hooks:
            hook.remove()
        for reference in self._handles:
            if (handle := reference()) is not None:
                _heal(handle)


def _forget(reference: weakref.ref[Away], _: Any) -> None:
    """Free the host memory of a storage that has died."""
    if (away := reference()) is not None:
        away.host = None
        away.courtesy._forget(away)


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
        for tensor in passed_tensors((args, kwargs)):
            # An interrupt may have kept restore() from giving the class back.
            if type(tensor) is AwayTensor and not _heal(tensor):
                if func in _SPELLING:
                    return f"<AwayTensor {_text_of(tensor)}>"
                raise AwayTensorError(
                    f"{operation_of(func)} got {_text_of(tensor)}. {_ADVICE}",
                    _guard_of(tensor)[1].courtesy,
                )
        return func(*args, **(kwargs or {}))

    @property
    def _is_param(self) -> bool:  # type: ignore[override]  # torch declares it as an attribute
        """What ``isinstance(t, torch.nn.Parameter)`` asks."""
        return issubclass(_guard_of(self)[0], Parameter) or bool(_attributes(self).get("_is_param"))


def can_leave(tensor: Tensor) -> bool:
    """Whether the class of a handle can be exchanged; not for one with slots."""
    cls = type(tensor)
    try:
        set_class(tensor, AwayTensor)
    except TypeError:
        return False
    set_class(tensor, cls)
    return True


def _heal(tensor: Tensor) -> bool:
    """Give a handle its class back; False if its bytes are away still."""
    if type(tensor) is AwayTensor:
        cls, away = _guard_of(tensor)
        if away.host is not None:
            return False
        del _attributes(tensor)[_GUARD]
        set_class(tensor, cls)
    return True


def _guard_of(tensor: Tensor) -> tuple[type[Tensor], Away]:
    """Return the class of a handle whose bytes are away, and the bytes."""
    found: tuple[type[Tensor], Away] = _attributes(tensor)[_GUARD]
    return found


def _attributes(tensor: Tensor) -> dict[str, Any]:
    attributes: dict[str, Any] = object.__getattribute__(tensor, "__dict__")
    return attributes


def _text_of(tensor: Tensor) -> str:
    with without_functions():
        n_bytes = _guard_of(tensor)[1].n_bytes
        text = describe(tensor.dtype, shape_of(tensor), tensor.device, n_bytes)
    return f"{text}, which a Courtesy moved to host memory"
