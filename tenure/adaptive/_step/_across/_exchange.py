"""The gradients of one attempt, summed over ranks, and the buffers of replicas.

Invariant: an exchange is made before ranks vote and run after; every tensor that it writes is there
already, and which tensors go together depends on shapes and types alone, as on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from tenure._errors import AdaptiveUsageError
from tenure._text import describe_tensor
from tenure._torch.quiet import without_functions
from tenure._torch.replicas import exchanged_buffers
from tenure.scopes import persist

from ..._ranks import Ballot, RankGroup, Replicated, mark_of
from .._gradients import IsolatedGradients

_MOST_BYTES = 25 * 2**20
"""Of a buffer, as of the buckets of DistributedDataParallel."""
_LARGE_BYTES = 4 * 2**20
"""A tensor of so much is worth a collective of its own, without a copy."""


class Exchange:
    """The gradients and buffers that ranks exchange once all have succeeded.

    Args:
        group: the ranks.
        gradients: those of the attempt.
        parameters: those whose gradients are exchanged, the same on all ranks.
        replicas: modules whose buffers become those of one rank.

    Attributes:
        n_missing: how many parameters have no gradient here, neither new nor old.
        mark_of_buffers: a number for the shapes of the buffers, which may have grown.
    """

    def __init__(
        self,
        group: RankGroup,
        gradients: IsolatedGradients,
        parameters: Sequence[Tensor],
        replicas: Sequence[Replicated],
    ) -> None:
        self._group = group
        self._gradients = gradients
        self._parameters = parameters
        # what another rank has a gradient for becomes the user's gradient here, too
        with persist(), torch.no_grad(), without_functions():
            gradients.watch(parameters)
            self._new = [_summable(parameter) for parameter in parameters]
            for parameter in parameters:
                _refuse_sparse(parameter, gradients.old(parameter))
            self._is_new = [parameter.grad is not None for parameter in parameters]
            # what was accumulated on one rank alone is exchanged, too, as by a replica
            self._has = [
                is_new or gradients.old(parameter) is not None
                for parameter, is_new in zip(parameters, self._is_new, strict=True)
            ]
            self._flags = torch.tensor(self._has, dtype=torch.int32, device="cpu")
            self._bunches = _Bunches(self._new)
            buffers = [b for replica in replicas for b in exchanged_buffers(replica)]
            self._buffers = _Bunches(buffers)
        self.n_missing = self._has.count(False)
        self.mark_of_buffers = mark_of(shapes_of(buffers))

    def run(self, share: float, tally: Ballot) -> None:
        """Exchange.

        Args:
            share: what the gradients of this rank are multiplied by.
            tally: what all have said.
        """
        with torch.no_grad(), without_functions():
            # which parameters have a gradient on some rank
            used = self._has
            if tally.n_missing:
                self._group.vote(self._flags)
                used = [n > 0 for n in self._flags.tolist()]
            self._scale(share, used)
            self._bunches.run(self._group.sum)
            for parameter, new, is_used in zip(self._parameters, self._new, used, strict=True):
                if is_used:
                    parameter.grad = new
            self._buffers.run(lambda buffer: self._group.copy_from(tally.least, buffer))

    def _scale(self, share: float, used: list[bool]) -> None:
        gradients = self._gradients
        for parameter, new, is_new, is_used in zip(
            self._parameters, self._new, self._is_new, used, strict=True
        ):
            if is_used and is_new:
                multiply(new, share)
            # as of a replica in a plain step, which averages what has been accumulated
            if is_used and (old := gradients.old(parameter)) is not None:
                new.add_(old, alpha=1 / self._group.size)
                gradients.contains_old(parameter)


class _Bunches:
    """Tensors for collectives: small ones are copied together, large ones go as they are."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._bunches: list[list[Tensor]] = []
        open_: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        # elements of the open bunch, and of the longest
        n_open: dict[tuple[torch.device, torch.dtype], int] = {}
        lengths: dict[tuple[torch.device, torch.dtype], int] = {}
        for tensor in tensors:
            if not tensor.numel():
                continue
            kind = tensor.device, tensor.dtype
            if tensor.nbytes >= _LARGE_BYTES:
                self._bunches.append([tensor])
                continue
            n_elements = n_open.get(kind, 0) + tensor.numel()
            if kind not in open_ or n_elements * tensor.itemsize > _MOST_BYTES:
                open_[kind], n_elements = [], tensor.numel()
                self._bunches.append(open_[kind])
            open_[kind].append(tensor)
            n_open[kind] = n_elements
            lengths[kind] = max(lengths.get(kind, 0), n_elements)
        self._buffers = {
            (device, dtype): torch.empty(length, dtype=dtype, device=device)
            for (device, dtype), length in lengths.items()
        }

    def run(self, collective: Callable[[Tensor], object]) -> None:
        """Run a collective, which changes a tensor in place, over all of them."""
        for first, *others in self._bunches:
            if first.nbytes >= _LARGE_BYTES:
                collective(first)
                continue
            bunch = [first, *others]
            lengths = [each.numel() for each in bunch]
            buffer = self._buffers[first.device, first.dtype][: sum(lengths)]
            views = [v.view(t.shape) for v, t in zip(buffer.split(lengths), bunch, strict=True)]
            for view, tensor in zip(views, bunch, strict=True):
                view.copy_(tensor)
            collective(buffer)
            for view, tensor in zip(views, bunch, strict=True):
                tensor.copy_(view)


def shapes_of(tensors: Iterable[Tensor]) -> list[tuple[tuple[int, ...], str]]:
    """Return the shapes and dtypes, which must be the same on all ranks."""
    return [(tuple(each.shape), str(each.dtype)) for each in tensors]


def multiply(gradient: Tensor, factor: float) -> None:
    """Multiply a gradient in place."""
    # nan, as of the mean of nothing, which zero times it would stay
    if not factor:
        gradient.zero_()
    elif factor != 1:
        gradient.mul_(factor)


def _summable(parameter: Tensor) -> Tensor:
    """Return the gradient, or zeros if there is none, in a form that a collective takes."""
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    _refuse_sparse(parameter, gradient)
    return gradient.contiguous() if gradient.nbytes >= _LARGE_BYTES else gradient


def _refuse_sparse(parameter: Tensor, gradient: Tensor | None) -> None:
    if gradient is not None and gradient.layout is not torch.strided:
        raise AdaptiveUsageError(
            f"{describe_tensor(parameter)} has a sparse gradient, of which ranks don't know how "
            "large their sum will be, so that adding up may run out of memory once all have "
            "agreed. Nothing was changed. Make the embedding with sparse=False."
        )
