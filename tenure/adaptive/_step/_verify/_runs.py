"""A step that is run on a few of its samples, whole and in parts, to be looked at and undone.

Invariant: a verification never runs the step out of memory, and no error of it reaches the user but
an interrupt.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack
from typing import Any, Literal, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn

from tenure._callers import without_warnings
from tenure._containers import passed_tensors, tensors_in
from tenure._errors import AdaptiveUsageError
from tenure._oom import oom_of_work
from tenure._torch.modules import BatchNorm, InstanceNorm
from tenure._torch.quiet import without_dispatch, without_functions
from tenure.scopes import DisposeScope

from ..._attempt import release
from ..._callables import unused
from ..._reachable import coupled_modules
from ..._undo import AllOf, RngState, named_modules
from .._loss import ONLY, numbers_of, widened_count
from .._modules import no_optimizer_steps, written_modules
from .._outputs import differentiable
from .._parts import StepParts
from .._samples import Leaf, SampleTree, cut_off
from .._split import StepOutcome, run_at
from ._modes import ConstantNumbers

T = TypeVar("T")
# The share of samples with the same value from which on the others are the ones that count.
_MASKED = 0.5
DifferenceKind = Literal["module", "buffer", "loss", "term", "gradient", "random"]
Numbers = dict[tuple[DifferenceKind, str], Tensor]


class ModuleCall(NamedTuple):
    """A call of a module.

    Attributes:
        name: the module, as its root and its path below that, and its type.
        given: a copy of the first tensor that it got; None for none.
        output: a copy of the first tensor of floating point that it returned.
    """

    name: str
    given: Tensor | None
    output: Tensor


class SampledRun(NamedTuple):
    """The results of one run.

    Attributes:
        outcome: its losses, and the sizes it ran in.
        numbers: all that is compared, by kind and name: buffers as the run left them, if these are
            watched; the loss; its terms, if there are several; and gradients.
        calls: what modules returned, those of all chunks one after the other; if watched.
        counts: what the terms of a whole divide by; None: all terms.
        kept: what plain attributes of modules got, if that is watched, by name.
    """

    outcome: StepOutcome
    numbers: Numbers
    calls: Sequence[ModuleCall] = ()
    counts: Mapping[str | None, float] = {}  # nobody writes there
    kept: Mapping[str, Tensor] = {}

    @classmethod
    def of(cls, outcome: StepOutcome) -> Self:
        """Return the losses of a run."""
        numbers: Numbers = {("loss", ONLY): outcome.loss}
        # a single term is the loss, and would be told twice
        if len(outcome.terms) > 1:
            numbers |= {("term", name): each for name, each in outcome.terms.items()}
        return cls(outcome, numbers)

    def rounded(self) -> list[Tensor]:
        """Return all that rounding may have changed: a float64 model may have a loss in float32."""
        numbers = [each for (kind, _), each in self.numbers.items() if kind != "buffer"]
        return [*numbers, *(call.output for call in self.calls)]


class MixesSamples(Exception):
    """Modules mix samples, as was allowed, and can't be kept from it; no user gets this."""


class SampledStep:
    """A step on any of its samples, with random numbers that can be compared.

    Args:
        parts: the call that is verified.
        is_asked: for `check_split`: the step as it was declared, also statistics of a part.

    Attributes:
        spec: what is verified: no scaler and no ``backward=``, which would see what is undone, and
            a loss of outputs is one that adds them up, because the user's may want as many samples
            as there are, and remember them.
        tree: the batch.
        n_samples: how many it has.
        without_statistics: whether those of a micro-batch were asked for, and are left out.
        is_random: whether it draws random numbers.
        draws_elsewhere: whether it draws others than torch's.
        draws_by_sample: whether it draws more of these for more samples.
        has_unknown: whether numbers of torch were drawn that differ for parts.
        types: the types of floating point to which its operations round.
        unnamed: the leaves that were not known before they were used, by identity, and what they
            are called in all runs; they are kept so that their identity stays theirs.
        refused: the error for a parameter that the function would write.
        kept: the buffers and attributes of modules that the function has written, so that the next
            part may read them, and so may the user's loss of outputs; with one of these, "" stands
            for other tensors that it keeps.
        n_run: the samples that were run.
        drawn: the random state that the last run left behind, if parts may get other numbers.
    """

    def __init__(self, parts: StepParts, *, is_asked: bool = False) -> None:
        self.spec = parts.spec
        if not is_asked:
            self.spec = dataclasses.replace(self.spec, scaler=None, backward=None)
            if callable(self.spec.loss):
                self.spec = dataclasses.replace(self.spec, loss=_mixed_sum, once=None)
        self.without_statistics = not is_asked and self.spec.batchnorm == "per_chunk"
        self._own_loss = parts.spec.loss
        self.tree, self.n_samples = parts.tree, parts.n_samples
        # until it was looked at: taken for random, it is compared with more care
        self.is_random = self.draws_elsewhere = True
        self.has_unknown = self.draws_by_sample = False
        self.types: set[torch.dtype] = set()
        self.unnamed: dict[int, tuple[Tensor, str]] = {}
        self.refused: AdaptiveUsageError | None = None
        self.kept: set[str] = set()
        self.n_run = 0
        self.drawn = RngState()
        # random state after the first call of the function, each of which begins alike
        self._after_call: RngState | None = None
        self._parts = parts
        # the same tensors in each run, so that their gradients are known again
        self._shared = [_part_of(leaf, None) if leaf.dim is None else None for leaf in parts.leaves]
        self._last: tuple[Sequence[int] | None, StepParts] | None = None
        # a write into an array of NumPy is not seen
        self._sees_writes = not any(hasattr(type(v), "__array_interface__") for v in parts.values)

    @property
    def has_others(self) -> bool:
        """True if parts may get different random numbers from the whole."""
        return self.has_unknown or self.draws_by_sample

    def parts_of(self, indices: Sequence[int] | None) -> StepParts:
        """Return the step on copies of some samples, without their graphs.

        The same again for the samples of the call before, unless the function has written there.

        Args:
            indices: which samples; None for all, which are no copies.
        """
        self.n_run += self.n_samples if indices is None else len(indices)
        last, self._last = self._last, None
        if last is None or last[0] != indices or last[1].inputs.written() is not None:
            values = [
                shared if leaf.dim is None else _part_of(leaf, indices)
                for leaf, shared in zip(self.tree.leaves, self._shared, strict=True)
            ]
            last = indices, StepParts(self.spec, self._parts, values)
            last[1].inputs.expects_writes = True
        if self._sees_writes:
            self._last = last
        return last[1]

    def forget(self) -> None:
        """Keep no samples."""
        self._last = None

    def take_own_loss(self) -> None:
        """Run the user's loss of outputs from now on."""
        self.forget()
        self.spec = dataclasses.replace(self.spec, loss=self._own_loss)

    def observe(
        self,
        indices: Sequence[int] | None,
        size: int,
        *,
        looks: bool = False,
        watches: bool = False,
        learns: bool = True,
        roughness: tuple[int, int] = (0, 0),
        apart: bool | None = None,
        scale_of_guess: float = 2.0,
    ) -> SampledRun:
        """Run once.

        A step that draws gets the same numbers for any number of samples. Numbers that torch does
        not draw are only set back for each call of the function; those of each sample are then
        others where it stands at another place.

        Args:
            indices: the samples; None for all.
            size: how many of them in a part.
            looks: see what numbers are drawn, what types operations round to, and what is written.
            watches: see buffers, and what modules return; their copies take memory.
            learns: run backward as well.
            roughness: how much worse each operation rounds, and which noise.
            apart: whether each part finds the modules as the whole does, and not as the part
                before has left them. None: either, and without statistics if these are left out.
            scale_of_guess: as of `StepParts`; not 1, because a guess may be right for so few.

        Raises:
            MixesSamples: statistics are to be left out, and can't be.
        """
        parts = self.parts_of(indices)
        spec, is_random = parts.spec, self.is_random
        leaves_out = self.without_statistics and apart is None
        state, rng = AllOf((parts.state, parts.gradients)), parts.state.rng
        start = parts.state.random_now() if is_random else rng
        numbers = ConstantNumbers(self.types if looks else None, *roughness)
        modules = [*named_modules(parts.roots)] if leaves_out or watches else []
        calls: list[ModuleCall] = []
        parts.is_asked, parts.scale_of_guess = looks, scale_of_guess
        made: list[weakref.ref[Tensor]] = []

        def from_start(batch: Any) -> Any:
            start.undo()
            if apart:
                parts.state.modules.undo()
            if not callable(spec.loss):
                returned = spec.fn(batch)
            else:
                with DisposeScope() as scope:
                    returned = spec.fn(batch)
                    made.extend(map(weakref.ref, scope.owned()))
                    scope.move_to_outer(scope.owned())
            if self.draws_elsewhere:
                now = parts.state.random_now()
                self._after_call = self._after_call or now
                self.draws_by_sample |= not now.drew_like(self._after_call)
            return returned

        with ExitStack() as block:
            block.enter_context(without_warnings())
            for name, module in modules:
                if leaves_out and _uses_statistics(module):
                    block.callback(setattr, module, "training", True)
                    module.training = False
                if watches:
                    hook = functools.partial(_note_call, name, calls)
                    block.enter_context(module.register_forward_hook(hook, with_kwargs=True))
            if leaves_out and coupled_modules(parts.roots):
                raise MixesSamples
            if not learns:
                # weights that were cast without a graph get no gradient
                block.callback(torch.clear_autocast_cache)
                block.enter_context(torch.no_grad())
            block.callback(setattr, parts, "spec", spec)
            parts.spec = dataclasses.replace(
                spec,
                fn=from_start if is_random or apart else spec.fn,
                # what is added once is no part of the values of samples
                once=spec.once if learns else None,
            )
            if is_random or looks or roughness[0]:
                block.enter_context(numbers)
            needs = parts.backward.needs_gradient_of
            block.enter_context(no_optimizer_steps(spec.entry, needs=needs))
            state.begin()
            try:
                # nor do hooks of leaves see it that are found only when they run
                parts.backward.is_thrown_away = True
                parts.backward.let_hooks_wait(parts.gradients.leaves())
                outcome = run_at(parts, size, trains=learns)
                counts: dict[str | None, float] = {}
                if not learns and size == parts.n_samples:
                    counts |= {n: float(widened_count(c)) for n, c in parts.counts.items()}
                    if spec.weight is not None:
                        counts[None] = numbers_of([spec.weight(parts.inputs.whole())])[0]
                with without_functions():
                    if looks:
                        has_drawn = rng.has_drawn()
                        self.draws_elsewhere = has_drawn and rng.has_drawn(elsewhere=True)
                        self.is_random = has_drawn or numbers.has_drawn
                        # an operation that may draw numbers, and has not: nothing is unknown
                        numbers.has_unknown &= has_drawn
                    self.has_unknown |= numbers.has_unknown
                    if looks:
                        self.kept |= _names_kept(parts)
                        handed_out = {id(each) for each in tensors_in([outcome.aux])}
                        there = [tensor for each in made if (tensor := each()) is not None]
                        self.kept |= {"" for each in there if id(each) not in handed_out}
                    # modules that write their own buffers mix samples as well
                    if leaves_out and written_modules(parts.roots, parts.state.modules):
                        raise MixesSamples
                    found = _buffers(parts.roots) if watches else {}
                    found |= SampledRun.of(outcome).numbers | self._gradients(parts)
                    if self.has_others:
                        self.drawn = parts.state.random_now()
                    kept = _kept(parts) if learns and hasattr(spec.fn, "on_compared") else {}
                    return SampledRun(outcome, found, calls, counts, kept)
            finally:
                state.undo()
                # an error holds this frame, and must not hold copies
                parts.state.finish()
                if parts.writes is not None:
                    self.refused = self.refused or parts.writes.error

    def counts(self, indices: Sequence[int]) -> Mapping[str | None, float]:
        """Return what the terms of samples divide by; None: all terms."""
        return self.observe(indices, len(indices), looks=True, learns=False).counts

    def _gradients(self, parts: StepParts) -> Numbers:
        """Copy the gradients that a run made."""
        # those that were known before anything ran are the same in each run
        names = _parameter_names(parts.models.found) | parts.leaf_names
        seen: dict[int, str] | None = None
        found: Numbers = {}
        taken: set[str] = set()
        for leaf, gradient in parts.gradients.new():
            name = names.get(id(leaf))
            if name is None:
                if id(leaf) not in self.unnamed:
                    seen = _parameter_names(parts.roots) if seen is None else seen
                    known = [other for _, other in self.unnamed.values()]
                    shown = seen.get(id(leaf), f"a tensor of shape {list(leaf.shape)}")
                    self.unnamed[id(leaf)] = leaf, unused(shown, known)
                name = self.unnamed[id(leaf)][1]
            if name in taken:
                name = unused(name, taken)
            taken.add(name)
            # those of two runs need not fit on a device
            found["gradient", name] = gradient.detach().cpu()
        return found


def first_that_fits(work: Callable[[int], T], sizes: Iterable[int]) -> T | None:
    """Return the work at the first size that fits; None if it fits at none, or can't be done.

    What a try that ran out of memory made is freed. What another leaves in a cache of the user's
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


def _uses_statistics(module: nn.Module) -> bool:
    """Return whether a module could normalize with the statistics that it has collected."""
    is_norm = isinstance(module, (BatchNorm, InstanceNorm))
    return is_norm and module.training and module.running_mean is not None


def _kept(parts: StepParts) -> dict[str, Tensor]:
    # those that only a run shows may be of a trainer, such as metrics that stand in for others
    names = {module: name for name, module in named_modules(parts.models.found)}
    return {
        f"{names[module]}.{key}": torch.as_tensor(value).detach().clone()
        for module, key, value in parts.state.modules.kept()
        if module in names and type(value) in (Tensor, int, float)
    }


def _names_kept(parts: StepParts) -> set[str]:
    """Return the buffers and attributes that modules have written, statistics of torch's left out.

    They are read in evaluation alone.
    """
    names = {
        module: name
        for name, module in named_modules(parts.roots)
        if not isinstance(module, (BatchNorm, InstanceNorm))
    }
    state = parts.state.modules
    kept = [(module, key) for module, key, _ in state.kept()] + state.written()
    return {f"{names[module]}.{key}" for module, key in kept if module in names}


def _buffers(roots: Mapping[str, nn.Module]) -> Numbers:
    return {
        ("buffer", f"{name}.{key} ({type(module).__name__})"): buffer.detach().clone()
        for name, module in named_modules(roots)
        for key, buffer in module._buffers.items()
        if buffer is not None
    }


def _parameter_names(roots: Mapping[str, nn.Module]) -> dict[int, str]:
    names: dict[int, str] = {}
    for path, module in named_modules(roots):
        for key, parameter in module._parameters.items():
            if parameter is not None:
                names.setdefault(id(parameter), f"{path}.{key}")
    return names


def _note_call(
    name: str, calls: list[ModuleCall], module: nn.Module, args: Any, kwargs: Any, output: Any
) -> None:
    given = next(passed_tensors([args, kwargs]), None)
    floats = (each for each in passed_tensors(output) if each.is_floating_point())
    if (first := next(floats, None)) is not None:
        # copies: the next module may write in place, such as ReLU(inplace=True)
        kept = None if given is None else given.detach().clone()
        named = f"{name} ({type(module).__name__})"
        calls.append(ModuleCall(named, kept, first.detach().clone()))


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


def chosen_samples(
    tree: SampleTree, n_samples: int, most: int, *, spreads: bool = False, commonest: bool = False
) -> list[int]:
    """Return the indices of at most ``most`` samples: small values first, large ones last.

    Those at the ends of what each tensor of the batch holds tell most about a loss. One that counts
    valid labels is a mean over samples as long as each has as many: the sample with the most
    ignored labels and the one with the fewest go to different ends, and so to different parts.

    Args:
        tree: the batch.
        n_samples: how many it has.
        most: how many to choose.
        spreads: put small and large values into each half, for what is declared as a sum: a masked
            mean is as good as one while one half has no sample that counts.
        commonest: where no half has room for one of each kind: choose what most samples have.
    """
    with without_functions():
        columns = [_told_apart(each, rarest_last=spreads) for each in _amounts(tree)]
        if spreads:
            # the leaves that are mostly the same are masks and labels
            columns.sort(key=lambda each: each[0], reverse=True)
            # a loss may count only samples that several masks let through
            shared: Any = sum(ranks for share, ranks in columns if share >= _MASKED)
            columns = [(share, ranks + 1e-6 * shared) for share, ranks in columns]
        orders = [
            (share, each.argsort(stable=True).tolist()) for share, each in columns if share < 1
        ]
    # two of either kind first: of few samples a mask alone tells which count
    pairs = [(i, order) for share, order in orders if spreads and share > _MASKED for i in (0, 1)]
    pairs += [(i, order) for i in range(most) for _, order in orders]
    left: list[int] = []
    right: list[int] = []
    n_left = -(-most // 2)
    for i, order in pairs:
        ends = [order[i], order[-1 - i]]
        if spreads and most < 4:
            # one that counts is wanted in each half, and nobody knows which kind does
            ends = order[:2] if commonest else order[-2:]
        elif spreads and i % 2:
            ends.reverse()
        for side, index, room in zip((left, right), ends, (n_left, most - n_left), strict=True):
            if len(side) < room and index not in left and index not in right:
                side.append(index)
    evenly = [i * n_samples // most for i in range(most)]
    for index in dict.fromkeys([*evenly, *range(min(n_samples, 2 * most))]):
        if index not in left and index not in right and len(left) + len(right) < most:
            (left if len(left) < n_left else right).append(index)
    return [*left, *reversed(right)]


def _told_apart(amounts: Tensor, *, rarest_last: bool) -> tuple[float, Tensor]:
    """Return the share of samples with the commonest amount, and the ranks of all.

    Args:
        amounts: of samples.
        rarest_last: rank amounts the other way round if most samples have the largest.
    """
    numbers = amounts.cpu().double()
    # in many tables nan says that there is no label
    numbers = (~numbers.isnan()).double() if bool(numbers.isnan().any()) else numbers
    values, ranks, counts = numbers.unique(return_inverse=True, return_counts=True)
    share, last = int(counts.max()) / len(numbers), len(values) - 1
    is_high = rarest_last and share > _MASKED and int(counts.argmax()) == last
    return share, last - ranks if is_high else ranks


def _amounts(tree: SampleTree) -> Iterator[Tensor]:
    """Yield a number for each sample of each leaf."""
    # labels and masks are counted by losses, measurements hardly ever
    for leaf in sorted(
        tree.leaves, key=lambda each: "float" in str(getattr(each.value, "dtype", "float"))
    ):
        if leaf.dim == "items":
            yield torch.tensor([float(_size_of(item)) for item in leaf.value])
        elif leaf.dim is not None:
            values = torch.as_tensor(leaf.value).detach()
            if not (values.is_complex() or values.layout is not torch.strided or values.is_nested):
                rows = values.movedim(leaf.dim, 0).flatten(1) if values.dim() > 1 else values
                yield rows.sum(1, dtype=torch.float32) if rows.dim() > 1 else rows


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
