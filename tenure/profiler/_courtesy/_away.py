"""What a storage and its handles are while its bytes are away: the same objects, in host memory.

The storage stays the same object, so whatever shares it (views, ties, graphs, versions) needs no
change. Its bytes exist at any moment on the device, in host memory, or on both, never on neither,
unless the storage itself has died. A handle gets a class that refuses every use: only what it
itself knows (shape, dtype, device, gradient and the like) can be asked. The class goes back to what
it was when the bytes are back, at the next use at the latest.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from torch import Tensor, UntypedStorage
from torch.nn import Parameter

from tenure._containers import passed_tensors
from tenure._errors import AwayTensorError
from tenure._heap import type_name
from tenure._text import describe, format_bytes, operation_of, shape_of
from tenure._torch import trap
from tenure._torch.quiet import set_class, without_functions, without_subclass_functions

from ._inventory import Holding
from ._staging import Segment, on_stream

_TRAP = "its bytes are in host memory: leave the block of tenure's Courtesy, or call its restore()."
_GUARD = "_tenure_away"
_ADVICE = (
    "Leave the block of the Courtesy, or call restore() on it (the attribute courtesy of this "
    "error), before it is used."
)
_GRADIENT: Any = Tensor.grad
# What the handle itself knows. Anything else reads bytes, or hands out a view that could.
_READABLE_PROPERTIES = (
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "retains_grad",
    "grad_fn", "output_nr", "_version", "_base", "nbytes", "itemsize",
    "is_cuda", "is_cpu", "is_xpu", "is_mps", "is_meta", "is_sparse", "is_sparse_csr",
    "is_quantized", "is_mkldnn", "is_nested", "_backward_hooks",
)  # fmt: skip
_READABLE_METHODS = (
    "size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "storage_offset",
    "is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_conj", "is_neg",
    "is_inference", "get_device", "__len__", "__dir__", "__hash__", "_is_view",
)  # fmt: skip


class Moved:
    """The bytes of a storage, its tensors and its graphs while they are away.

    Args:
        courtesy: the Courtesy that moved it, which is asked to ``_forget`` what is back or dead.
        holding: the storage and all that shares it.
        host: uint8[n_bytes], the bytes of the storage.
        segment: where they lay.

    Attributes:
        n_bytes: how many bytes.
        device: where they belong.
        host: the bytes, or None when they are not needed any more.
    """

    def __init__(self, courtesy: Any, holding: Holding, host: Tensor, segment: Segment) -> None:
        self.courtesy = courtesy
        self.n_bytes = host.numel()
        self.device = holding.storage.device
        self.host: Tensor | None = host
        self.n_tensors = len(holding.tensors)
        self._segment = segment
        self._hooks: list[Any] = []
        self._handles = [weakref.ref(handle) for handle in holding.handles]
        self._storage = weakref.ref(holding.storage, partial(_let_go, weakref.ref(self)))

    @property
    def text(self) -> str:
        """How many bytes of which device."""
        return f"{format_bytes(self.n_bytes)} on {self.device}"

    @property
    def storage(self) -> UntypedStorage | None:
        """The storage, or None when it has died."""
        return self._storage()

    @property
    def is_away(self) -> bool:
        """Whether the bytes in host memory are the ones that count."""
        return self.host is not None

    def leave(self, holding: Holding) -> None:
        """Make every use loud, then let go of the device memory."""
        # Handles first, nodes next, memory last: whatever fails between, no use reads freed bytes;
        # see test_an_interrupt_while_leaving_brings_back_what_had_left.
        for handle in holding.handles:
            guard(handle, self)
        for node in holding.nodes.values():
            # Weakly: the graph would keep the bytes in host memory as long as it lives.
            refusal = partial(_refuse, weakref.ref(self), type_name(type(node)))
            self._hooks.append(node.register_prehook(refusal))
        holding.storage.resize_(0)
        # C++ that has a pointer passes Python by: the empty storage itself refuses. See
        # test_what_passes_python_by_is_trapped_meanwhile.
        trap.arm(holding.storage, f"{self.text}: {_TRAP}")

    def allocate(self) -> UntypedStorage | None:
        """Give the storage its memory back, whose bytes are undefined yet; None if it has died.

        Raises:
            RuntimeError: there is no memory for it, and it stays as it was.
        """
        storage = self.storage
        # An earlier restore() may have come this far, and failed in the copies.
        if storage is not None and storage.nbytes() != self.n_bytes:
            trap.disarm(storage)
            try:
                with on_stream(self.device, self._segment):
                    storage.resize_(self.n_bytes)
            # Out of memory, or an interrupt: it is away still, and must refuse as before.
            except BaseException:
                trap.arm(storage, f"{self.text}: {_TRAP}")
                raise
        return storage

    def come_back(self) -> None:
        """Let the tensors and graphs be used again; the storage has its bytes."""
        self.host = None
        for hook in self._hooks:
            hook.remove()
        for reference in self._handles:
            handle = reference()
            if handle is not None:
                heal(handle)


def _let_go(reference: weakref.ref[Moved], _: Any) -> None:
    """The storage has died, and nobody needs its bytes any more."""
    moved = reference()
    if moved is not None:
        moved.host = None
        moved.courtesy._forget(moved)


def _refuse(reference: weakref.ref[Moved], node: str, _: tuple[Tensor, ...]) -> None:
    moved = reference()
    if moved is not None and moved.is_away:
        refuse_backward(node, moved)


@dataclass(slots=True)
class Guard:
    """What is written on a handle whose bytes are away.

    Attributes:
        cls: the class that it has else.
        parts: its storage, or of a sparse tensor its storages.
    """

    cls: type[Tensor]
    parts: list[Moved]

    @property
    def is_away(self) -> bool:
        """Whether any of its bytes are not on the device."""
        return any(part.is_away for part in self.parts)


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
        # Its bytes may be back: then this use gives the class back, and goes on.
        for tensor in passed_tensors((args, kwargs)):
            if type(tensor) is AwayTensor and not heal(tensor):
                refuse(tensor, operation_of(func))
        return func(*args, **(kwargs or {}))

    @property
    def _is_param(self) -> bool:  # type: ignore[override]  # torch declares it as an attribute
        """What ``isinstance(t, torch.nn.Parameter)`` asks."""
        guard = _guard_of(self)
        is_class = guard is not None and issubclass(guard.cls, Parameter)
        return is_class or bool(_attributes(self).get("_is_param"))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # untyped
        return repr(self) if heal(self) else f"<AwayTensor {_text_of(self)}>"

    def __str__(self) -> str:
        return repr(self)

    def __format__(self, spec: str) -> str:
        return format(self, spec) if heal(self) else repr(self)


def can_guard(tensor: Tensor) -> bool:
    """Whether the class of a handle can be exchanged; not for one with slots."""
    cls = type(tensor)
    try:
        set_class(tensor, AwayTensor)
    except TypeError:
        return False
    set_class(tensor, cls)
    return True


def guard(tensor: Tensor, part: Moved) -> None:
    """Let a handle refuse every use while ``part`` is away."""
    found = _guard_of(tensor)
    # A sparse tensor lies in several storages, each of which may be away.
    if found is not None:
        found.parts.append(part)
        return
    cls = type(tensor)
    set_class(tensor, AwayTensor)
    _attributes(tensor)[_GUARD] = Guard(cls, [part])


def heal(tensor: Tensor) -> bool:
    """Give a handle its class back; False if its bytes are away still."""
    found = _guard_of(tensor)
    if found is None:
        return True
    if found.is_away:
        return False
    del _attributes(tensor)[_GUARD]
    set_class(tensor, found.cls)
    return True


def refuse(tensor: Tensor, operation: str) -> NoReturn:
    """Raise the error that names ``operation`` and what ``tensor`` is.

    Raises:
        AwayTensorError: always.
    """
    found = _guard_of(tensor)
    assert found is not None
    courtesy = found.parts[0].courtesy
    raise AwayTensorError(f"{operation} got {_text_of(tensor)}. {_ADVICE}", courtesy)


def refuse_backward(node: str, part: Moved) -> NoReturn:
    """Raise the error for a node of a graph that saved what is away.

    Raises:
        AwayTensorError: always.
    """
    raise AwayTensorError(
        f"backward() came to {node}, which saved a tensor of {part.text} that a Courtesy moved to "
        f"host memory. {_ADVICE}",
        part.courtesy,
    )


def _guard_of(tensor: Tensor) -> Guard | None:
    if type(tensor) is not AwayTensor:
        return None
    found: Guard | None = _attributes(tensor).get(_GUARD)
    return found


def _attributes(tensor: Tensor) -> dict[str, Any]:
    attributes: dict[str, Any] = object.__getattribute__(tensor, "__dict__")
    return attributes


def _text_of(tensor: Tensor) -> str:
    found = _guard_of(tensor)
    n_bytes = sum(part.n_bytes for part in found.parts) if found else 0
    with without_functions():
        text = describe(tensor.dtype, shape_of(tensor), tensor.device, n_bytes)
    return f"{text}, which a Courtesy moved to host memory"


# the gradient can also be let go: that is what zero_grad() does
_READABLE = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in _READABLE_PROPERTIES),
        *(getattr(Tensor, name) for name in _READABLE_METHODS),
        _GRADIENT.__get__,
        _GRADIENT.__set__,
        _GRADIENT.__delete__,
    }
)
