"""The step that is verified, on any of its samples, with random numbers that can be compared.

Invariant: a verification never runs the step out of memory, and no error of it reaches the user but
an interrupt.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from tenure._errors import AdaptiveUsageError
from tenure._oom import oom_of_work
from tenure._torch.modules import BatchNorm, InstanceNorm
from tenure._torch.quiet import without_dispatch
from tenure.scopes import DisposeScope

from ..._attempt import release
from ..._undo import named_modules
from .._modules import coupled_modules
from .._outputs import differentiable
from .._parts import StepParts
from .._samples import Leaf, SampleTree, cut_off
from ._modes import ConstantNumbers, RoughRounding
from ._observed import LeafNames, Observed, buffers_of, observed_run

T = TypeVar("T")
# The share of samples without a label from which on the others are the ones that count.
_MASKED = 0.5


class Subject:
    """The step.

    Args:
        parts: the call that is verified.
        is_asked: for `check_split`: the step as it was declared, also statistics of a part.

    Attributes:
        spec: what is verified: no scaler and no ``backward=``, which would see what is taken back,
            and a loss of outputs is one that adds them up, because the user's may want as many
            samples as there are, and sees all of them anyway.
        tree: the batch.
        n_samples: how many it has.
        is_random: whether it draws random numbers.
        draws_elsewhere: whether it draws others than torch's.
        has_unknown: whether numbers were drawn that differ for parts.
        types: the types of floating point to which its operations round.
        names: what leaves without a name are called, in all runs.
        refused: the error for a parameter that the function would write.
        n_run: the samples that were run.
    """

    def __init__(self, parts: StepParts, *, is_asked: bool = False) -> None:
        self.spec = parts.spec
        if not is_asked:
            self.spec = dataclasses.replace(self.spec, scaler=None, backward=None)
            if callable(self.spec.loss):
                self.spec = dataclasses.replace(self.spec, loss=_mixed_sum, once=None)
        # those of a micro-batch may be wanted, and are left out then
        self.without_statistics = not is_asked and self.spec.batchnorm == "per_chunk"
        self.tree, self.n_samples = parts.tree, parts.n_samples
        # until it was looked at: taken for random, it is compared with more care
        self.is_random = self.draws_elsewhere = True
        self.has_unknown = False
        self.types: set[torch.dtype] = set()
        self.names: LeafNames = {}
        self.refused: AdaptiveUsageError | None = None
        self.n_run = 0
        self._parts = parts
        # the same tensors in each run, so that their gradients are known again
        shared = (i for i, leaf in enumerate(self.tree.leaves) if not leaf.is_split)
        self._shared = {i: _part_of(self.tree.leaves[i], None) for i in shared}
        self._last: tuple[list[int], StepParts] | None = None
        # a write into an array of NumPy is not seen
        self._sees_writes = not any(hasattr(type(v), "__array_interface__") for v in parts.values)

    @property
    def has_others(self) -> bool:
        """True if parts may get different random numbers from the whole."""
        return self.has_unknown or self.draws_elsewhere

    def parts_of(self, indices: Sequence[int] | None) -> StepParts:
        """Return the step on copies of some samples, without their graphs.

        The same again for the samples of the call before, unless the function has written there.

        Args:
            indices: which samples; None for all, which are no copies.
        """
        self.n_run += self.n_samples if indices is None else len(indices)
        last, self._last = self._last, None
        if last is not None and last[0] == indices:
            return last[1]
        values = [
            _part_of(leaf, indices) if leaf.is_split else self._shared[i]
            for i, leaf in enumerate(self.tree.leaves)
        ]
        parts = StepParts(self.spec, self._parts, values)
        parts.inputs.expects_writes = True
        return parts

    def observe(
        self,
        indices: list[int],
        size: int,
        *,
        looks: bool = False,
        watches: bool = False,
        rough: RoughRounding | None = None,
    ) -> Observed | None:
        """Run once; return None if statistics are to be left out and can't be.

        Args:
            indices: the samples.
            size: how many of them in a part.
            looks: see what numbers are drawn, what types operations round to, and what is written.
            watches: see buffers, and what modules return.
            rough: how much worse each operation rounds.
        """
        parts = self.parts_of(indices)
        types, leaves_out = self.types if looks else None, self.without_statistics
        with self.comparable(parts, rough=rough, types=types) as numbers:
            if leaves_out and coupled_modules(parts.roots):
                return None
            try:
                watch = watches or leaves_out
                result = observed_run(parts, size, watch=watch, asks=looks, names=self.names)
            finally:
                if parts.writes is not None:
                    self.refused = self.refused or parts.writes.error
        # an operation that may draw numbers, and has not: nothing is unknown
        self.has_unknown |= numbers.has_unknown and (not looks or result.draws[0])
        if looks:
            self.is_random, self.draws_elsewhere = result.draws
            self.is_random |= numbers.has_drawn
        is_same = self._sees_writes and not parts.inputs.is_written
        self._last = (indices, parts) if is_same else None
        # modules that write their own buffers mix samples as well
        now = buffers_of(parts) if leaves_out else {}
        is_written = any(not torch.equal(now[name], result.buffers[name]) for name in now)
        return None if is_written else result

    @contextmanager
    def comparable(
        self,
        parts: StepParts,
        *,
        rough: RoughRounding | None = None,
        types: set[torch.dtype] | None = None,
    ) -> Iterator[ConstantNumbers]:
        """Return a block in which a step draws the same numbers for any number of samples.

        Numbers that torch does not draw are only set back for each call of the function; those of
        each sample are then others where it stands at another place.

        Args:
            parts: the step.
            rough: how much worse each operation rounds.
            types: gets the types of floating point that operations round to.
        """
        numbers = ConstantNumbers(types)
        with ExitStack() as block:
            if self.without_statistics:
                block.enter_context(_without_statistics(parts.roots))
            # below the constant numbers, for it draws some of its own
            if rough is not None:
                block.enter_context(rough)
            if self.is_random:
                block.enter_context(_set_back(parts))
            if self.is_random or types is not None:
                block.enter_context(numbers)
            yield numbers

    def forget(self) -> None:
        """Keep no samples."""
        self._last = None


def first_that_fits(work: Callable[[int], T], sizes: Iterable[int]) -> T | None:
    """Return the work at the first size that fits; None if it fits at none, or can't be done.

    What a try that ran out of memory made is let go. What another leaves in a cache of the user's
    stays, as it would after a step.
    """
    # an error that is handled around the step is no failure of this work
    outside = sys.exception()
    for size in sizes:
        failure: Exception | None = None
        result = None
        with DisposeScope("verification of step") as scope:
            try:
                result = work(size)
            except Exception as error:
                failure = error
            info = None if failure is None else oom_of_work(failure, outside)
            # caches that a model filled meanwhile are the user's
            if info is None and (made := scope.owned()):
                scope.move_to_outer(made)
            if failure is None:
                return result
            release(failure, outside)
        failure = None
        # a function that can't run on so few samples
        if info is None or not info.retry_safe:
            return None
    return None


@contextmanager
def _set_back(parts: StepParts) -> Iterator[None]:
    """Open a block in which each call of the function starts from one random state."""
    spec, start = parts.spec, parts.state.random_now()

    def from_start(batch: Any) -> Any:
        start.undo()
        return spec.fn(batch)

    parts.spec = dataclasses.replace(spec, fn=from_start)
    try:
        yield
    finally:
        parts.spec = spec
        start.undo()


@contextmanager
def _without_statistics(roots: Mapping[str, nn.Module]) -> Iterator[None]:
    """Normalize with running statistics: those of a micro-batch were asked for."""
    kinds = (BatchNorm, InstanceNorm)
    found = [
        module
        for _, module in named_modules(roots)
        if isinstance(module, kinds) and module.training and module.running_mean is not None
    ]
    try:
        for module in found:
            module.training = False
        yield
    finally:
        for module in found:
            module.training = True


def _mixed_sum(outputs: Any) -> Tensor:
    """Return a loss to which each element of the outputs counts, and each sample differently."""
    tree = SampleTree(outputs, None, name="output", argument="out_dims", is_deep=True)
    total: Any = 0.0
    for tensor in differentiable(tree):
        # other factors would be another loss in the next run
        numbers = torch.Generator().manual_seed(0)
        # these are not the function's own, and constant ones would weigh samples alike
        with without_dispatch():
            factors = torch.rand(tensor.shape, generator=numbers, dtype=torch.float32) + 0.5
        real = torch.view_as_real(tensor).sum(-1) if tensor.is_complex() else tensor
        total = total + (real * factors.to(real)).sum()
    if not isinstance(total, Tensor):
        raise TypeError("no outputs of floating point")
    return total


# --- which samples


def chosen_samples(tree: SampleTree, n_samples: int, most: int) -> list[int]:
    """Return the indices of at most ``most`` samples: small values first, large ones last.

    Those at the ends of what each tensor of the batch holds tell most about a loss. One that counts
    valid labels is a mean over samples as long as each has as many: the sample with the most
    ignored labels and the one with the fewest go to different ends, and so to different parts.
    """
    orders = [sums.argsort(stable=True).tolist() for sums in _amounts(tree)]
    return _in_halves(
        ((order[i], order[-1 - i]) for i in range(most) for order in orders), n_samples, most
    )


def spread_samples(tree: SampleTree, n_samples: int, most: int) -> list[int]:
    """Return the indices of at most ``most`` samples, with samples that count in each half.

    A masked mean is as good as a sum while one sample alone is not masked: two that count are
    needed, in different halves. Of a leaf that is mostly the same these are the ones that differ.
    """
    columns = sorted(_columns(tree), key=lambda each: each.share, reverse=True)
    # a loss may count only those that several masks let through
    shared: Any = sum(each.scaled for each in columns if each.share >= _MASKED)
    orders = [(each.scaled + 1e-6 * shared).argsort(stable=True).tolist() for each in columns]
    ends = [*((order[-1], order[-2]) for order in orders), *(order[:2] for order in orders)]
    return _in_halves(ends, n_samples, most)


def _in_halves(pairs: Iterable[Sequence[int]], n_samples: int, most: int) -> list[int]:
    """Return samples with the first of pairs, others, and then the second of pairs."""
    left: list[int] = []
    right: list[int] = []
    n_left = -(-most // 2)
    for a, b in pairs:
        for index, side, room in zip((a, b), (left, right), (n_left, most - n_left), strict=True):
            if len(side) < room and index not in left and index not in right:
                side.append(index)
    evenly = (i * n_samples // most for i in range(most))
    for index in dict.fromkeys([*evenly, *range(min(n_samples, 2 * most))]):
        if index not in left and index not in right and len(left) + len(right) < most:
            (left if len(left) < n_left else right).append(index)
    return [*left, *reversed(right)]


class _SampleColumn(NamedTuple):
    """A leaf as one number for each sample.

    Attributes:
        scaled: from 0 to 1, and 0 for the commonest if most have that.
        share: the share of the samples that have the commonest.
    """

    scaled: Tensor
    share: float


def _columns(tree: SampleTree) -> Iterator[_SampleColumn]:
    listed = [leaf.value for leaf in tree.leaves if leaf.dim == "items"]
    counted = (torch.tensor([float(_size_of(item)) for item in items]) for items in listed)
    for amounts in chain(_amounts(tree), counted):
        numbers = amounts.cpu().double()
        # in many tables nan says that there is no label
        numbers = (~numbers.isnan()).double() if bool(numbers.isnan().any()) else numbers
        values, counts = numbers.unique(return_counts=True)
        if len(values) > 1:
            share = int(counts.max()) / len(numbers)
            scaled = (numbers - values[0]) / (values[-1] - values[0])
            # such as 255 for pixels without a label
            is_high = share > _MASKED and int(counts.argmax()) == len(values) - 1
            yield _SampleColumn(1 - scaled if is_high else scaled, share)


def _size_of(item: Any) -> int:
    """Return how many numbers an item of a list holds, such as the boxes of an image."""
    if isinstance(item, Mapping):
        return sum(map(_size_of, item.values()))
    if isinstance(item, Tensor):
        return item.numel()
    return len(item) if isinstance(item, Sized) else 0


def _part_of(leaf: Leaf, indices: Sequence[int] | None) -> Any:
    """Copy some samples of a leaf without graph; all of them (None) are the leaf itself."""
    value = leaf.value
    if indices is None or leaf.dim is None:
        # another tensor of the same memory: the function may let it require grad
        is_free = isinstance(value, Tensor) and not value.requires_grad
        return value.detach() if is_free else cut_off(value)
    if leaf.dim == "items":
        return type(value)([value[i] for i in indices])
    if isinstance(value, Tensor):
        with torch.no_grad():
            picked = value.index_select(leaf.dim, torch.tensor(indices, device=value.device))
        return picked.requires_grad_() if value.requires_grad else picked
    return value.take(indices, axis=leaf.dim)


def _amounts(tree: SampleTree) -> Iterator[Tensor]:
    """Return a number for each sample of leaves whose samples differ; labels first.

    Lists of items are left out.
    """
    leaves = [leaf for leaf in tree.leaves if leaf.is_split and leaf.dim != "items"]
    # labels and masks are counted by losses, measurements hardly ever
    for leaf in sorted(leaves, key=_is_measured):
        assert isinstance(leaf.dim, int)
        values = torch.as_tensor(leaf.value)
        if values.is_complex() or values.layout is not torch.strided or values.is_nested:
            continue
        with torch.no_grad():
            rows = values.detach().movedim(leaf.dim, 0).flatten(1) if values.dim() > 1 else values
            sums = rows.detach().sum(1, dtype=torch.float32) if rows.dim() > 1 else rows.detach()
            if bool((sums != sums[0]).any()):
                yield sums


def _is_measured(leaf: Leaf) -> bool:
    return "float" in str(getattr(leaf.value, "dtype", "float"))
