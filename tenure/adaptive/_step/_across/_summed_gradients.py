"""The gradients of one attempt, summed up over ranks.

Invariant: made before ranks vote, run after; then every tensor that is written is there already.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from tenure._errors import AdaptiveUsageError
from tenure._text import describe_tensor
from tenure._torch.quiet import without_functions
from tenure._torch.replicas import exchanged_buffers
from tenure.scopes import persist

from ..._ranks import RankGroup, Replicated, Tally, mark_of
from .._gradients import IsolatedGradients
from ._staged import Staged, is_in_place


class Exchange:
    """What ranks exchange once all have succeeded.

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
            self._source = torch.zeros(3, dtype=torch.int64, device="cpu")
            self._staged = Staged(parameters)
            self._buffers = [b for replica in replicas for b in exchanged_buffers(replica)]
            self._staged_buffers = Staged(self._buffers)
        self.n_missing = self._has.count(False)
        self.mark_of_buffers = mark_of(shapes_of(self._buffers))

    def run(
        self, share: float, own_factors: Mapping[int, float], tally: Tally, *, has_data: bool
    ) -> None:
        """Exchange.

        Args:
            share: what the gradients of this rank are multiplied by.
            own_factors: by what those that are not exchanged are, by the id of the leaf; that of 0
                is for all that have none of their own.
            tally: what all have said.
            has_data: whether there are samples on this rank.
        """
        exchanged = {id(parameter) for parameter in self._parameters}
        with torch.no_grad(), without_functions():
            for leaf, gradient in self._gradients.new():
                if id(leaf) not in exchanged:
                    _multiply(gradient, own_factors.get(id(leaf), own_factors[0]))
            self._sum(share, self._used(tally))
            self._bring_buffers(tally, has_data=has_data)

    def drop(self) -> None:
        """Deliver nothing: no rank has samples."""
        for leaf, _ in self._gradients.new():
            leaf.grad = None

    def _used(self, tally: Tally) -> list[bool]:
        """Which parameters have a gradient on some rank."""
        if tally.n_missing:
            self._group.vote(self._flags)
            return [n > 0 for n in self._flags.tolist()]
        return self._has

    def _sum(self, share: float, used: list[bool]) -> None:
        gradients = self._gradients
        for parameter, new, is_new, is_used in zip(
            self._parameters, self._new, self._is_new, used, strict=True
        ):
            if not is_used:
                continue
            if is_new:
                _multiply(new, share)
            # as of a replica in a plain step, which averages what has been accumulated
            if (old := gradients.old(parameter)) is not None:
                new.add_(old, alpha=1 / self._group.size)
                gradients.contains_old(parameter)
        self._staged.run(self._new, self._group.sum)
        for parameter, new, is_used in zip(self._parameters, self._new, used, strict=True):
            if is_used:
                parameter.grad = new

    def _bring_buffers(self, tally: Tally, *, has_data: bool) -> None:
        if not self._buffers:
            return
        group, source = self._group, 0
        # those of a rank that ran nothing have learned nothing
        if tally.n_with_data < group.size:
            mark = self.mark_of_buffers
            for i, number in enumerate((group.rank if has_data else group.size, mark, -mark)):
                self._source[i] = number
            group.vote(self._source, torch.minimum)
            source, least, most = map(int, self._source.tolist())
            # collectives of other lengths may end the process: all ranks see it here
            if least != -most:
                raise AdaptiveUsageError(
                    "step() has left a replica with buffers of other shapes on a rank with samples "
                    "than on one without. Nothing was delivered. Let the shapes of buffers not "
                    "depend on samples, or give every rank some."
                )
        self._staged_buffers.run(self._buffers, lambda buffer: group.copy_from(source, buffer))


def shapes_of(tensors: Iterable[Tensor]) -> list[tuple[tuple[int, ...], str]]:
    """What has to be the same on all ranks of tensors that they exchange."""
    return [(tuple(each.shape), str(each.dtype)) for each in tensors]


def _multiply(gradient: Tensor, factor: float) -> None:
    # nan, as of the mean of nothing, which zero times it would stay
    if not factor:
        gradient.zero_()
    elif factor != 1:
        gradient.mul_(factor)


def _summable(parameter: Tensor) -> Tensor:
    """The gradient, or zeros where there is none, in a form that a collective takes."""
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    _refuse_sparse(parameter, gradient)
    return gradient.contiguous() if is_in_place(parameter) else gradient


def _refuse_sparse(parameter: Tensor, gradient: Tensor | None) -> None:
    if gradient is not None and gradient.layout is not torch.strided:
        raise AdaptiveUsageError(
            f"{describe_tensor(parameter)} has a sparse gradient, of which ranks don't know how "
            "large their sum will be, so that adding up may run out of memory once all have "
            "agreed. Nothing was changed. Make the embedding with sparse=False."
        )
