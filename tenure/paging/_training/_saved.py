"""What a graph keeps of a paged model: of weights where they were, of all else the tensors.

Nodes save tensors for the backward pass. What lies in a page, which may be a view of a weight, is
kept as its unit and its form, so that it holds no bytes and is fetched again. All else goes to the
hooks around, of a checkpoint or of the user's, and where there are none to the host, if that is
wanted, or it is kept as it is.

Invariant: what was written since it was saved raises, as in a plain model. torch asks no versions
where hooks are, so they are asked here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tenure._text import describe, describe_tensor
from tenure._torch.autograd import hooks_of_saved, is_running_node
from tenure._torch.lending import lent_to
from tenure._torch.quiet import aside_with_subclasses, quietly, without_functions
from tenure._torch.storages import byte_range
from tenure._torch.writes import version_of

from .._device import Engine, Page
from .._model import HostTensor, Unit, made_around
from ._activations import Activations, Moved

Hooks = tuple[Callable[[Any], Any], Callable[[Any], Any]]
PageOf = Callable[[Unit], Page]
Packed = Callable[[], Tensor]
"""A node keeps it in place of a tensor; it gives the tensor back."""
_CHECKPOINT = "torch.utils.checkpoint"
_NOTHING = torch.empty(0, device="cpu")
"""What hooks of a checkpoint get in the place of a weight."""


class SavedTensors:
    """The hooks of a paged model.

    Args:
        engine: the pages.
        page_of: gives a backward pass the page of a unit, for the current stream to read.
        activations: what takes all else to the host; None where it stays.
        begin: has a backward pass begin, if it has not yet.
    """

    def __init__(
        self,
        engine: Engine,
        page_of: PageOf,
        activations: Activations | None,
        begin: Callable[[], object],
    ) -> None:
        self._engine, self._page_of = engine, page_of
        self._begin, self._activations = begin, activations

    def watch(self) -> Callable[[], object] | None:
        """Stand before all other hooks of this thread from now on.

        Returns:
            What ends that; None where these hooks were the first already.
        """
        around = hooks_of_saved()
        if around is not None and getattr(around[0], "func", None) == self._pack:
            return None
        hooks = saved_tensors_hooks(partial(self._pack, around), self._unpack)
        hooks.__enter__()
        return hooks.__exit__

    def _pack(self, around: Hooks | None, tensor: Tensor) -> Packed:
        with without_functions():
            weight = self._weight(tensor)
        if weight is None and hasattr(type(tensor), "__tensor_flatten__"):
            weight = self._composed(tensor)
        if around is not None:
            pack, unpack = around
            if weight is None:
                return partial(unpack, pack(tensor))
            if is_of_checkpoint(around):
                return partial(_recomputed, partial(unpack, pack(_NOTHING)), weight)
        if weight is not None:
            return weight
        if self._activations is not None:
            with without_functions():
                moved = self._activations.take(tensor)
            if moved is not None:
                return partial(self._back, moved)
        # Not itself: an output that its own node keeps would keep the node, and neither ever goes.
        with quietly() if type(tensor) is Tensor else without_functions():
            kept = tensor.detach()
        return partial(_unwritten, kept, version_of(kept))

    def _unpack(self, packed: Packed) -> Tensor:
        """Return a saved tensor, as it was.

        Raises:
            RuntimeError: it was written since.
            PagingError: the model is unpaged, or there is no room for the weight.
        """
        if torch.is_grad_enabled() and is_running_node():
            # A backward pass that is differentiated makes a graph of its own, which must not keep
            # weights either. The engine takes the hooks back when the node that asks has run; who
            # looks at what a node saved, outside of one, would be left with them.
            self.watch()
        return packed()

    def _weight(self, tensor: Tensor) -> Packed | None:
        """Return a tensor as part of a page; None if it lies in none."""
        lent = lent_to(tensor)
        unit = None if lent is None else lent.lender
        page = self._engine.room.pages.get(unit) if isinstance(unit, Unit) else None
        if lent is None or page is None or not page.lends(lent) or tensor.is_neg():
            return None
        offset = int(tensor.storage_offset())
        form = offset, tensor.size(), tensor.stride()
        hosts = _hosts_at(page.unit, offset * tensor.element_size())
        n_writes = _n_writes(page, hosts)
        lent.saved.update(host.name for host in hosts)
        weight = partial(self._weight_back, page.unit, hosts, n_writes, tensor.dtype, form)
        return partial(_conjugate, weight) if tensor.is_conj() else weight

    def _weight_back(
        self,
        unit: Unit,
        hosts: list[HostTensor],
        expected: int,
        dtype: torch.dtype,
        form: tuple[Any, ...],
    ) -> Tensor:
        page = self._page_of(unit)
        n_writes = _n_writes(page, hosts)
        if n_writes != expected:
            _refuse(" or ".join(repr(host.name) for host in hosts), n_writes, expected)
        return page.view(dtype, *form)

    def _composed(self, tensor: Tensor) -> Packed | None:
        """Return a tensor that is made of parts of pages, or a view of one; None if another."""
        parts: list[Packed] = []

        def take(part: Tensor) -> Tensor:
            if not part.numel():
                return part
            weight = self._weight(part)
            if weight is None:
                raise LookupError
            parts.append(weight)
            # Its form alone, which holds no bytes
            return torch.empty_like(part, device="meta")

        # A class may refuse anything, in any way; then it is kept, with the bytes that it is of.
        with suppress(Exception), aside_with_subclasses():
            return partial(_composed_back, made_around(tensor, take), parts)
        return None

    def _back(self, moved: Moved) -> Tensor:
        assert self._activations is not None
        n_writes = version_of(moved.away.writes)
        if n_writes != moved.away.n_writes:
            size, device = moved.form[1], moved.away.writes.device
            n_bytes = size.numel() * moved.dtype.itemsize
            _refuse(describe(moved.dtype, size, device, n_bytes), n_writes, moved.away.n_writes)
        self._begin()
        return self._activations.give(moved)


def is_of_checkpoint(hooks: Hooks | None) -> bool:
    """Return whether hooks are those of a checkpoint, as it computes or recomputes."""
    return hooks is not None and getattr(hooks[0], "__module__", None) == _CHECKPOINT


def _recomputed(recompute: Packed, weight: Packed) -> Tensor:
    # A checkpoint recomputes all of its modules when a node first asks for what it saved. A node
    # that had its weight by then would hold it beside each of theirs.
    recompute()
    return weight()


def _composed_back(like: Tensor, parts: list[Packed]) -> Tensor:
    found = (part() for part in parts)
    with aside_with_subclasses():
        return made_around(like, lambda part: next(found) if part.numel() else part)


def _conjugate(packed: Packed) -> Tensor:
    with quietly():
        return packed().conj()


def _unwritten(kept: Tensor, expected: int | None) -> Tensor:
    n_writes = version_of(kept)
    if n_writes != expected:
        _refuse(describe_tensor(kept), n_writes, expected)
    return kept


def _hosts_at(unit: Unit, at_bytes: int) -> list[HostTensor]:
    """Return the tensors of a unit that lie over one of its bytes."""
    found = []
    for host in unit.tensors:
        start, end = byte_range(host.tensor)
        if host.at_bytes <= at_bytes < host.at_bytes + end - start:
            found.append(host)
    return found


def _n_writes(page: Page, hosts: list[HostTensor]) -> int:
    # `.data` that is set raises no version.
    return sum(page.version_of(host) + host.n_given for host in hosts)


def _refuse(what: str, n_writes: int | None, expected: int | None) -> NoReturn:
    # torch's own words first: programs and people know them.
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: {what} is at version {n_writes}; expected version {expected} instead. It was "
        "saved by the forward of a paged model. Run backward() before it is written, or clone() it "
        "in the forward."
    )
