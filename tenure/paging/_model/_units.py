"""A tensor of a model, the bytes of a storage that tensors share, and what is paged in one piece.

Invariant: a tensor is in one extent, and an extent in one unit; where each begins is counted in
bytes from the beginning of its unit, and is the same on the host and on the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tenure._cuda_blocks import up_to
from tenure._torch.writes import version_of

EXTENT_ALIGNMENT_BYTES = 256
# What CUDA's allocator rounds to.
UNIT_ALIGNMENT_BYTES = 512


@dataclass(eq=False, slots=True)
class HostTensor:
    """One parameter or buffer of the model, as it is on the host.

    Attributes:
        tensor: the object that the model registered.
        name: its first qualified name.
        is_buffer: whether it is registered as a buffer.
        at_bytes: where it begins in its extent; from when it is in a unit, in that unit.
        touched: whether code outside of the model's forward may have written to it.
        home: the address of its bytes in the pager's memory; 0 while they are the model's own.
        home_form: its form there.
        home_strides: its strides there.
    """

    tensor: Tensor
    name: str
    is_buffer: bool
    at_bytes: int = 0
    touched: bool = False
    home: int = 0
    home_form: tuple[object, ...] = ()
    home_strides: tuple[int, ...] = ()
    _unit: weakref.ref[Unit] | None = None

    @property
    def unit(self) -> Unit | None:
        """What it is paged with; None for one of the unpaged tensors."""
        return None if self._unit is None else self._unit()

    def join(self, unit: Unit, start: int) -> None:
        """Become part of a unit, in which its extent begins at byte ``start``."""
        # Weakly: a plan may be dropped before it is carried out, and what it refers to must go.
        self._unit = weakref.ref(unit)
        self.at_bytes += start

    def remember_home(self) -> None:
        """Remember where it lies now, in the pager's memory, and how."""
        self.home = self.tensor.data_ptr()
        self.home_form, self.home_strides = self.form, self.tensor.stride()

    @property
    def has_left(self) -> bool:
        """Whether it was given other memory: ``parameter.data = other`` does that."""
        # `half()`, `to()` and quantizers set `.data`, of which no version tells.
        return self.home != 0 and self.tensor.data_ptr() != self.home

    @property
    def form(self) -> tuple[object, ...]:
        """What must not change while it is paged."""
        tensor = self.tensor
        return tensor.dtype, tensor.device, tensor.size()

    @property
    def version(self) -> int:
        """Grows with each write in place that autograd would notice."""
        return version_of(self.tensor) or 0


@dataclass(eq=False, slots=True)
class Extent:
    """The bytes of one storage that tensors of the model use, from the first to the last.

    Attributes:
        low_byte: where they begin in the storage.
        n_bytes: how many there are.
        tensors: the tensors over them.
    """

    low_byte: int
    n_bytes: int
    tensors: list[HostTensor] = field(default_factory=list)

    @property
    def storage(self) -> torch.UntypedStorage:
        """The storage they lie in, which a plan that is not carried out must not keep alive."""
        return self.tensors[0].tensor.untyped_storage()


@dataclass(eq=False, slots=True, weakref_slot=True)
class Unit:
    """Tensors that are paged together.

    Attributes:
        name: of the modules that it serves.
        extents: its memory.
        is_loose: whether no module's forward brackets each of its uses: it holds tensors of modules
            around others, or of such as are never called.
        tensors: its tensors, whose ``at_bytes`` count from its beginning.
        n_bytes: what it takes on the device.
    """

    name: str
    extents: list[Extent]
    is_loose: bool = False
    tensors: list[HostTensor] = field(default_factory=list)
    n_bytes: int = 0

    def __post_init__(self) -> None:
        for extent in self.extents:
            for host in extent.tensors:
                host.join(self, self.n_bytes)
                self.tensors.append(host)
            self.n_bytes = up_to(self.n_bytes + extent.n_bytes, EXTENT_ALIGNMENT_BYTES)
        self.n_bytes = up_to(self.n_bytes, UNIT_ALIGNMENT_BYTES)

    def starts(self) -> Iterator[tuple[Extent, int]]:
        """Its extents, each with the byte of the unit that it begins at."""
        start = 0
        for extent in self.extents:
            yield extent, start
            start = up_to(start + extent.n_bytes, EXTENT_ALIGNMENT_BYTES)

    def span_of(self, host: HostTensor) -> tuple[int, int]:
        """Where the extent of one of its tensors begins in the unit, and its bytes."""
        return next(
            (start, extent.n_bytes) for extent, start in self.starts() if host in extent.tensors
        )

    def __repr__(self) -> str:
        return f"<Unit {self.name!r}, {self.n_bytes} bytes>"
