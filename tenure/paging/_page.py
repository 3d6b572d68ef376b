"""The bytes of one unit on the device, and the tensors that show them in place of the host's.

A tensor that is made of others is shown as one that is made of their copies. Its class writes the
parts below autograd, which counts a write of the whole alone: that is passed on to the parts here,
whose pages go by their own counts.

Invariant: a page's tensors lie in its bytes and in no others. While one of them is held, by a
variable, a view, a graph, or something that only shares its bytes, those stay the page's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from tenure._torch.compiler import never_compiled
from tenure._torch.lending import Lent, form_of
from tenure._torch.quiet import aside, aside_with_subclasses
from tenure._torch.storages import is_held
from tenure._torch.writes import counter_of, set_version

from ._memory import Place
from ._tensors import HostTensor, Unit, made_around, parts_of

RESIDENT = "paged: resident"
"""What reports of memory call bytes of the device that units keep."""


@dataclass(eq=False, slots=True)
class Page:
    """A unit on the device.

    Attributes:
        unit: what it holds.
        memory: uint8, on the device; the ring, or that of its place.
        start: its first byte in the memory.
        place: where it stays, in a slab; None of a unit that passes.
        ready: the event after which its bytes are there.
        host_versions: of each tensor of the unit, the version that was copied.
        users: how many running forwards use it.
        streams: the streams that have used it, by id.
        waited: the ids of those that have waited for ``ready``.
        last_use: the events that its last use ends with; None while that can't be known.
    """

    unit: Unit
    memory: Tensor
    start: int
    place: Place | None = None
    ready: Any = None
    host_versions: dict[HostTensor, int] = field(default_factory=dict)
    users: int = 0
    streams: dict[int, Any] = field(default_factory=dict)
    waited: set[int] = field(default_factory=set)
    last_use: list[Any] | None = field(default_factory=list)
    _lent: Lent | None = None
    _shown: dict[HostTensor, Tensor] = field(default_factory=dict)
    _shown_versions: dict[HostTensor, int] = field(default_factory=dict)
    _forms: dict[HostTensor, tuple[object, ...]] = field(default_factory=dict)
    _aliases: dict[HostTensor, Tensor] = field(default_factory=dict)
    _nodes: dict[HostTensor, object] = field(default_factory=dict)
    # Tensors that were shown since the last look for writes, and those that something may hold.
    # Only these are checked, because the modules of a unit come one by one.
    _unseen: dict[HostTensor, None] = field(default_factory=dict)
    _doubtful: dict[HostTensor, None] = field(default_factory=dict)

    @property
    def is_resident(self) -> bool:
        """Whether it stays."""
        return self.place is not None

    def bytes_of(self, start: int, n_bytes: int) -> Tensor:
        """Part of the page, from ``start``, as uint8."""
        return self.memory[self.start + start : self.start + start + n_bytes]

    @never_compiled
    def shown(self, host: HostTensor) -> Tensor:
        """Return the tensor on the device that stands for a host tensor; the same one each time."""
        found = self._shown.get(host)
        # One object as long as the page is there: who knows a weight by identity finds it again.
        if found is None:
            with aside():
                found = self._show(host)
            self._shown_versions[host], self._forms[host] = counter_of(found), form_of(found)
            self._shown[host] = found
            self._lend().show(found, host.name)
        # Some kernels choose their way by this flag, also where no graph is recorded. Where one is,
        # the weights must not be part of it: it would hold their bytes. Autocast keeps a copy of
        # each weight that asks for gradients: it would fill the device.
        asks = host.tensor.requires_grad and not (
            torch.is_grad_enabled() or torch.is_autocast_enabled(found.device.type)
        )
        if found.requires_grad is not asks:
            # Its method is forbidden within torch.func.
            found.requires_grad = asks
        self._unseen[host] = self._doubtful[host] = None
        return found

    def alias(self, host: HostTensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the graph's alias of a host tensor; the same one until ``end_aliases()``.

        Args:
            host: the tensor.
            make: makes it of the tensor that is shown: another one over its bytes and versions.
        """
        found = self._aliases.get(host)
        if found is None:
            found = self._aliases[host] = make(self.shown(host))
            self._nodes[host] = found.grad_fn
            self._lend().show(found, host.name)
        return found

    def end_aliases(self) -> list[HostTensor]:
        """Let go of what stands in graphs; the tensors that were written there as no leaf is."""
        aliases, nodes = self._aliases, self._nodes
        # Written in place where a graph is recorded, it has become what another node gave.
        written = [host for host in aliases if aliases[host].grad_fn is not nodes[host]]
        for alias in aliases.values():
            self._lend().tensors.pop(id(alias), None)
            # it was set on the model's own tensor, too, where it would be saved
            vars(alias).pop("_is_param", None)
        aliases.clear()
        nodes.clear()
        return written

    def version_of(self, host: HostTensor) -> int:
        """Return how often a tensor was written, on the host and here, as autograd counts it."""
        shown = self._shown.get(host)
        unsaved = 0 if shown is None else counter_of(shown) - self._shown_versions[host]
        return host.version + unsaved

    def lends(self, lent: Lent) -> bool:
        """Return whether its tensors lie there."""
        return self._lent is lent

    def view(self, dtype: torch.dtype, *form: Any) -> Tensor:
        """Return a tensor over its bytes that no graph and no mode knows.

        Args:
            dtype: of it.
            form: its offset, in elements from the page's beginning, its size and its strides.
        """
        with aside():
            made: Any = torch.empty(0, dtype=dtype, device=self.memory.device)
            return made.set_(self._lend().storage, *form)  # type: ignore[no-any-return]

    @property
    def storages(self) -> tuple[UntypedStorage, ...]:
        """The storage of its tensors; none before the first is shown."""
        return () if self._lent is None else (self._lent.storage,)

    @property
    def recorded_streams(self) -> dict[int, Any]:
        """The streams that ``record_stream()`` of its tensors said use it, by id."""
        return {} if self._lent is None else self._lent.streams

    def is_held(self) -> bool:
        """Return whether anything else holds one of its tensors, or what shares its bytes.

        See Note [Pages, ring and fences], rule 4.
        """
        if self._lent is None:
            return False
        if self._lent.is_shared(len(self._shown) + len(self._aliases)):
            return True
        for host in list(self._doubtful):
            if any(host in each and is_held(each, host) for each in (self._shown, self._aliases)):
                return True
            # Nobody holds it, so nobody can before it is shown again.
            del self._doubtful[host]
        return False

    def is_held_by_any(self) -> bool:
        """Return whether any of its tensors is held; a weak reference may have revived one."""
        self._doubtful.update(dict.fromkeys(self._shown))
        return self.is_held()

    def held(self) -> list[str]:
        """Return the names of its tensors that something else holds, or what shares their bytes."""
        both = self._shown, self._aliases
        names = [host.name for each in both for host in each if is_held(each, host)]
        return names or ([host.name for host in self._shown] if self.is_held() else [])

    def stale(self) -> list[HostTensor]:
        """Return the tensors that may have changed on the host since they were copied."""
        return [host for host in self.unit.tensors if self.is_stale(host)]

    def is_stale(self, host: HostTensor) -> bool:
        """Return whether one of them may have."""
        return host.is_aliased or host.version != self.host_versions.get(host) or host.has_left

    def note_copied(self) -> None:
        """Remember that what is on the host now is what the page will hold."""
        for host in self.unit.tensors:
            # Back at home, it has the version that it had before it left.
            host.is_aliased = host.has_left
        self.host_versions = {host: host.version for host in self.unit.tensors}

    def forget_copied(self) -> None:
        """Take no byte of it for what is on the host: its copy failed."""
        # So the next use copies all of it.
        self.host_versions = {}

    def written(self, *, with_buffers: bool) -> list[HostTensor]:
        """Return the tensors that have been written on the device since this was last asked.

        Args:
            with_buffers: count every vector that is a buffer and was shown: batch norm's kernels
                write their statistics without raising a version.
        """
        written = []
        unseen = self._take_unseen()
        # A tensor that nobody holds can't have been written since.
        for host in list(self._shown) if unseen else {**self._unseen, **self._doubtful}:
            tensor = self._shown[host]
            # No other buffers: masks, and matrices that adapters share, are large, and no kernel's
            # to write.
            is_unseen = unseen or (with_buffers and host.is_buffer and tensor.dim() == 1)
            if is_unseen or counter_of(tensor) != self._shown_versions[host]:
                written.append(host)
        return written

    def forget_moved(self) -> list[HostTensor]:
        """Forget the tensors that lie in other memory, or in another form, and return whose."""
        # As after `Tensor.set_(weight, other)` or `weight.t_()`: no write to it is in the page.
        both = self._shown, self._aliases
        moved = [
            host
            for host in {**self._unseen, **self._doubtful}
            if any(host in each and form_of(each[host]) != self._forms[host] for each in both)
        ]
        for host in moved:
            for known in (*both, self._nodes, self._unseen, self._doubtful):
                known.pop(host, None)
        return moved

    def note_saved(self, written: list[HostTensor]) -> None:
        """Note that these are on their way to the host, which has counted a write of each."""
        self._unseen.clear()
        for host in written:
            self._shown_versions[host] = counter_of(self._shown[host])
            self.host_versions[host] = host.version

    def _take_unseen(self) -> bool:
        """Return whether an alias may be written unseen; ask again as long as there is one."""
        if self._lent is None or not self._lent.is_aliased:
            return False
        # `.data`, a detached view or a NumPy array may be written at any time as long as it is
        # there.
        self._lent.is_aliased = self.is_held()
        return True

    @never_compiled
    def _show(self, host: HostTensor) -> Tensor:
        original = host.tensor
        view = torch.empty(0, dtype=original.dtype, device=self.memory.device)
        offset = host.at_bytes // original.element_size()
        view.set_(self._lend().storage, offset, original.size(), original.stride())
        return in_place_of(original, view)

    def _lend(self) -> Lent:
        if self._lent is None:
            # Aliases hold no more than a storage: the ring's says not whose.
            self._lent = Lent(self.memory, self.start, self.unit.n_bytes, self.unit)
        return self._lent


class IdlePages:
    """Passing pages between the end of their use and the end of their place.

    Looking whether something holds one takes time, and so only those that were held are looked at
    again: a page in ``free`` was held by nothing when it was last looked at.
    """

    def __init__(self) -> None:
        self._free: dict[Unit, Page] = {}
        self._held: dict[Unit, Page] = {}

    def add(self, page: Page) -> None:
        """Note that no pass uses a page any more; something may still hold it."""
        (self._held if page.is_held() else self._free)[page.unit] = page

    def discard(self, page: Page) -> None:
        """Forget a page that is used again, or whose place is given back."""
        self._free.pop(page.unit, None)
        self._held.pop(page.unit, None)

    @property
    def has_held(self) -> bool:
        """Whether a page was held at the last look."""
        return bool(self._held)

    def clear(self) -> None:
        """Forget all."""
        self._free.clear()
        self._held.clear()

    def free(self) -> dict[Unit, Page]:
        """Return the pages that nothing holds, in the order in which they became free."""
        for page in list(self._held.values()):
            if not page.is_held():
                del self._held[page.unit]
                self._free[page.unit] = page
        return self._free

    def take(self, page: Page) -> bool:
        """Discard a page if nothing holds it now: who had a weak reference may have it again."""
        self.discard(page)
        if page.is_held_by_any():
            self._held[page.unit] = page
            return False
        return True


@never_compiled
def in_place_of(original: Tensor, copy: Tensor) -> Tensor:
    """Make a copy pass for the original: its class, and its attributes, which either may set."""
    if isinstance(original, nn.Parameter) and not isinstance(copy, nn.Parameter):
        copy = nn.Parameter(copy, requires_grad=False)
    share_attributes(original, copy)
    return copy


def share_attributes(original: Tensor, copy: Tensor) -> None:
    """Let a copy have the attributes of the original, also those that are set on either later.

    If the copy has some itself, it gets the others as they are now: the tensors that a subclass is
    made of are attributes, too.
    """
    if not vars(copy):
        copy.__dict__ = vars(original)  # pyright: ignore[reportAttributeAccessIssue]  # it can be set
    for name, value in vars(original).items():
        vars(copy).setdefault(name, value)


class Composed:
    """The copies of tensors that are made of others, as the forwards of one model see them.

    Each is the same object as long as anything has it, and at most until the next `settle()`
    otherwise, or the bytes of its parts would never be free.

    Args:
        device: where the copies are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[HostTensor, Tensor] = {}
        self._n_writes: dict[HostTensor, int] = {}

    @never_compiled
    def of(self, host: HostTensor, shown: dict[int, Tensor]) -> Tensor:
        """Return the tensor that replaces a host tensor.

        Args:
            host: the tensor.
            shown: what stands for each of its parts, by the ``id`` of that.
        """
        made = self._made.get(host)
        if made is None:
            with aside_with_subclasses():
                made = self._made[host] = self._make(host.tensor, shown)
            self._n_writes[host] = counter_of(made)
        return made

    def settle(self) -> None:
        """Pass writes on to the parts, and let go of what nothing else has."""
        for host in list(self._made):
            n_writes = counter_of(self._made[host])
            if n_writes != self._n_writes[host]:
                self._n_writes[host] = n_writes
                for part in parts_of(self._made[host]).values():
                    set_version(part, counter_of(part) + 1)
            if not is_held(self._made, host):
                del self._made[host], self._n_writes[host]

    def _make(self, original: Tensor, shown: dict[int, Tensor]) -> Tensor:
        def instead(part: Tensor) -> Tensor:
            # An empty one has no page, nor has one that the program has put there since.
            found = shown.get(id(part))
            return part.to(self._device) if found is None else found

        made = made_around(original, instead)
        if isinstance(original, nn.Parameter):
            # As a parameter is made of a subclass, but for a detached copy, around detached parts.
            vars(made)["_is_param"] = True
        return in_place_of(original, made)
