"""A model's tensors by the memory they use: the extents they share, the units they are paged in.

A quantized weight is a tensor of a class of its own around plain ones, its numbers and its scales.
These are paged, and what a forward reads is made anew around their copies. What counts as made of
plain tensors has shown that another can be made around others.

Invariant: each tensor object stands in the table once, under one extent; tied parameters, shared
modules and views of one storage share theirs. An extent is in one unit; where each begins is
counted in bytes from the beginning of its unit, and is the same on the host and on the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor, nn

from tenure._cuda_blocks import up_to
from tenure._errors import PagingError
from tenure._storages import named_inner_tensors
from tenure._text import describe_tensor
from tenure._torch.lending import watch
from tenure._torch.quiet import aside_with_subclasses
from tenure._torch.storages import byte_range, key_of
from tenure._torch.writes import version_of

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


def is_plain(tensor: Tensor) -> bool:
    """Return whether its bytes in a storage are all there is to it."""
    return (
        # A subclass may be made of several tensors, as quantized weights are, or mean something
        # else by its bytes; a conjugated one is the bytes of another.
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and tensor.numel() > 0
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def parts_of(tensor: Tensor) -> dict[str, Tensor]:
    """Return the plain tensors inside a tensor, by path; none if it can't be rebuilt."""
    # A class may refuse anything, in any way.
    try:
        found = dict(_parts(tensor))
        return found if found and _can_be_made_anew(tensor) else {}
    except Exception:
        return {}


def made_around(tensor: Tensor, instead: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a tensor of the same class around different plain tensors.

    Args:
        tensor: as of ``parts_of``, or a view of such a one.
        instead: gives what stands for a plain tensor, or for an empty one.
    """
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inside = {name: getattr(tensor, name) for name in names}
    parts = {
        name: instead(each) if _is_leaf(each) else made_around(each, instead)
        for name, each in inside.items()
    }
    made: Tensor = type(tensor).__tensor_unflatten__(  # type: ignore[attr-defined]
        parts, context, tensor.size(), tensor.stride()
    )
    return made


def _parts(tensor: Tensor, path: str = "") -> Iterator[tuple[str, Tensor]]:
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inside = named_inner_tensors(tensor)
    # A DTensor names its mesh, too, which has another part of it on each rank; and what makes a
    # tensor each time it is asked has no bytes that could be moved.
    if len(inside) != len(names) or any(getattr(tensor, name) is not each for name, each in inside):
        raise TypeError(type(tensor))
    for name, each in inside:
        if is_plain(each):
            yield f"{path}{name}", each
        elif not _is_leaf(each):
            yield from _parts(each, f"{path}{name}.")


def _is_leaf(tensor: Tensor) -> bool:
    return is_plain(tensor) or (type(tensor) in _PLAIN and not tensor.numel())


def _can_be_made_anew(tensor: Tensor) -> bool:
    """Return whether rebuilding gives the same tensor, on the device of its parts."""
    places = count(1)

    def beside_others(part: Tensor) -> Tensor:
        # As in a page, where each part begins elsewhere in one storage, which a class may refuse.
        start, (first, end) = next(places), byte_range(part) if part.numel() else (0, 0)
        room = start + (end - first) // part.element_size()
        memory = torch.empty(room, dtype=part.dtype, device="meta")
        return memory.as_strided(part.size(), part.stride(), start)

    with aside_with_subclasses():
        made = made_around(tensor, beside_others)
        forms = [(type(t), t.dtype, t.size(), t.stride(), t.layout) for t in (tensor, made)]
        return forms[0] == forms[1] and made.device.type == "meta"


EXTENT_ALIGNMENT_BYTES = 256
# What CUDA's allocator rounds to.
UNIT_ALIGNMENT_BYTES = 512

# Kernels read whole vectors, and choose their way by the address: a tensor keeps its place modulo
# this, or it would be computed with in another order than by the plain model.
_ADDRESS_ALIGNMENT_BYTES = 16


@dataclass(eq=False, slots=True, weakref_slot=True)
class HostTensor:
    """One parameter or buffer of the model, as it is on the host.

    Attributes:
        tensor: the object that the model registered.
        name: its first qualified name.
        is_buffer: whether it is registered as a buffer.
        at_bytes: where it begins in its extent; from when it is in a unit, in that unit.
        is_aliased: whether code outside of the model's forward may have written to it unseen.
        home: the address of its bytes in the pager's memory; 0 while they are the model's own.
        home_form: its form there.
        home_strides: its strides there.
        n_given: how often it was brought back there, as it had been given other memory.
        parts: the plain tensors that it is made of, which are paged in its place.
        around: the tensors that it is a part of.
        is_shared: whether the model has its memory, or the object, under another name as well.
    """

    tensor: Tensor
    name: str
    is_buffer: bool
    at_bytes: int = 0
    is_aliased: bool = False
    home: int = 0
    home_form: tuple[object, ...] = ()
    home_strides: tuple[int, ...] = ()
    n_given: int = 0
    parts: list[HostTensor] = field(default_factory=list)
    around: list[Tensor] = field(default_factory=list)
    is_shared: bool = False
    _unit: weakref.ref[Unit] | None = None

    @property
    def unit(self) -> Unit | None:
        """What it is paged with; None for an empty tensor, or one that has parts."""
        return None if self._unit is None else self._unit()

    @property
    def units(self) -> list[Unit]:
        """What it is paged with, all of its parts."""
        return [each.unit for each in self.parts or [self] if each.unit is not None]

    def join(self, unit: Unit, start: int) -> None:
        """Become part of a unit, in which its extent begins at byte ``start``."""
        # Weakly: a plan may be dropped before it is carried out, and what it refers to must go.
        self._unit = weakref.ref(unit)
        self.at_bytes += start

    def remember_home(self) -> None:
        """Remember where it lies now, in the pager's memory, and how."""
        self.home = self.tensor.data_ptr()
        self.home_form, self.home_strides = self.form, self.tensor.stride()
        # Code that keeps the parameter, such as an optimizer, may write through .data unseen.
        watch(self.tensor.untyped_storage(), self)

    @property
    def has_left(self) -> bool:
        """Whether it was given other memory, or its own in another layout, through ``.data``."""
        # `half()`, `to()` and quantizers set `.data`, of which no version tells.
        return self.home != 0 and (
            self.tensor.data_ptr() != self.home or self.tensor.stride() != self.home_strides
        )

    @property
    def form(self) -> tuple[object, ...]:
        """What must not change while it is paged."""
        tensor = self.tensor
        return tensor.dtype, tensor.device, tensor.size()

    @property
    def version(self) -> int:
        """Grows with each write in place that autograd would notice."""
        # Its class writes a part below autograd, which counts the write of the whole alone.
        version = version_of(self.tensor) or 0
        for each in self.around:
            version += version_of(each) or 0
        return version


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
        """Yield its extents, each with its first byte in the unit."""
        start = 0
        for extent in self.extents:
            yield extent, start
            start = up_to(start + extent.n_bytes, EXTENT_ALIGNMENT_BYTES)

    def spans_of(self, hosts: Collection[HostTensor]) -> list[tuple[int, int]]:
        """Return the first and last bytes of some tensors' extents; neighbours are joined."""
        spans: list[tuple[int, int]] = []
        asked, is_next = frozenset(hosts), False
        for extent, start in self.starts():
            is_asked = not asked.isdisjoint(extent.tensors)
            if is_asked:
                first = spans.pop()[0] if is_next else start
                spans.append((first, start + extent.n_bytes))
            is_next = is_asked
        return spans

    def __repr__(self) -> str:
        return f"<Unit {self.name!r}, {self.n_bytes} bytes>"


class TensorTable:
    """The parameters and buffers of a model.

    Args:
        model: the model; each of its modules is read once.

    Attributes:
        hosts: every tensor, by the ``id`` of its object.
        direct: for each module, the tensors that it registers itself, and what these are made of.

    Raises:
        PagingError: a tensor is neither plain nor made of plain ones.
    """

    def __init__(self, model: nn.Module) -> None:
        self.hosts: dict[int, HostTensor] = {}
        self.direct: dict[nn.Module, list[HostTensor]] = {}
        for prefix, module in model.named_modules():
            found = [self._host_of(*each) for each in _registered(module, prefix)]
            self.direct[module] = [each for host in found for each in (host, *host.parts)]
        self._extents = self._lay_out()

    def extents_of(self, modules: Iterable[nn.Module]) -> list[Extent]:
        """Return the extents that the modules use themselves, in order of registration."""
        found = {
            id(extent): extent
            for module in modules
            for host in self.direct[module]
            if (extent := self._extents.get(id(host.tensor))) is not None
        }
        return list(found.values())

    def _host_of(self, name: str, tensor: Tensor, is_buffer: bool) -> HostTensor:
        # A tied weight, as of a language model whose head is its embedding, is one tensor under two
        # names: it keeps the first of them.
        host = self.hosts.get(id(tensor))
        if host is None:
            host = self.hosts[id(tensor)] = HostTensor(tensor, name, is_buffer)
            if not is_plain(tensor):
                inside = parts_of(tensor).items()
                host.parts = [self._host_of(f"{name}.{path}", t, False) for path, t in inside]
                for part in host.parts:
                    part.around.append(tensor)
        else:
            host.is_shared = True
        return host

    def _lay_out(self) -> dict[int, Extent]:
        by_storage: dict[int, list[HostTensor]] = {}
        for host in self.hosts.values():
            if is_plain(host.tensor):
                # Views of one storage, as the parts of a fused projection are, must keep their
                # distance: whoever writes through one of them is seen through the others.
                by_storage.setdefault(key_of(host.tensor.untyped_storage()), []).append(host)
            elif not host.parts and host.tensor.numel():
                raise PagingError(
                    f"{host.name!r} ({describe_tensor(host.tensor)}) can't be paged: it is sparse, "
                    "or of a class that can't be made anew around copies of its parts "
                    "(__tensor_flatten__, __tensor_unflatten__). Make it a plain tensor, or keep "
                    "it out of the parameters and buffers of the model."
                )
        extents = map(_extent, by_storage.values())
        return {id(host.tensor): extent for extent in extents for host in extent.tensors}


def _registered(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor, bool]]:
    dot = f"{prefix}." if prefix else ""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield dot + name, parameter, False
    for name, buffer in module._buffers.items():
        if buffer is not None:
            yield dot + name, buffer, True


def _extent(hosts: list[HostTensor]) -> Extent:
    ranges = [byte_range(host.tensor) for host in hosts]
    for host in hosts:
        host.is_shared |= len(hosts) > 1
    low = min(start for start, _ in ranges) // _ADDRESS_ALIGNMENT_BYTES * _ADDRESS_ALIGNMENT_BYTES
    high = max(end for _, end in ranges)
    for host, (start, _) in zip(hosts, ranges, strict=True):
        host.at_bytes = start - low
    return Extent(low, high - low, hosts)
