"""`check_split`, and the verification of a step: gradients before it runs, then its loss.

Counts that have a least value, such as ``count.clamp(min=1)``, add up to too much. A count is
clamped only where it is as low as a count can be, so the lowest one of a split is looked at if
nothing lower was seen before. If half of its samples count less, it was not clamped. Else it is
compared with what its samples and those of another micro-batch count together.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from tenure._callers import warn_user
from tenure._errors import (
    AdaptiveUsageError,
    AdaptiveUsageWarning,
    BatchCoupledError,
    SplitMismatchError,
)
from tenure._show import steps
from tenure._text import listed
from tenure._torch.compiler import draws_again_in_backward, not_compiling
from tenure._torch.quiet import without_functions

from ..._reachable import coupled_modules
from ..._sizes import checked_size
from .._arguments import StepSpec
from .._gradients import Scaler
from .._loss import ONLY, Reduction, plain_number, read_numbers
from .._modules import UPDATE_AFTER
from .._parts import Chunk, Divisors, StepParts
from .._samples import SampleDims
from .._split import StepOutcome
from ._advice import DO_NOT_CLAMP, advice_for, declaration_for, of_outputs
from ._compare import (
    GRADIENTS,
    OUTPUTS,
    Comparison,
    Mismatch,
    SplitDifference,
    SplitReport,
    differences,
    exchanged,
    first_module,
    mismatch,
    rtol_of,
)
from ._runs import SampledRun, SampledStep, chosen_samples, first_that_fits
from ._when import SplitCall

_COARSE = (torch.float16, torch.bfloat16)
_UPDATE_AFTER = (
    "It also gives other results whenever it is called again, for the same samples and random "
    "numbers: it remembers something outside of its modules, such as past losses, or how often it "
    "was called. Update that after step(), once for each batch; or pass verify=False if "
    "micro-batches may see it change."
)
_COUNT_RTOL = (1e-4, 2e-2)
# of numbers in float64
_TINY = 1e-5
_OF_AN_EPSILON = (
    "So small a difference may come of an epsilon, as in g / (g.norm() + 1e-8): if g is the "
    'gradient of a mean, take that of the sum (reduction="sum"), or pass verify=False.'
)


Batch = TypeVar("Batch")


def check_split(
    fn: Callable[[Batch], Any],
    batch: Batch,
    *,
    loss: Reduction | Callable[[Any], Tensor] = "mean",
    weight: Callable[[Batch], object] | None = None,
    then: Callable[..., Tensor] | None = None,
    once: Callable[[], Tensor] | None = None,
    model: nn.Module | Iterable[nn.Module] | None = None,
    scaler: Scaler | None = None,
    in_dims: SampleDims = 0,
    out_dims: SampleDims = 0,
    n_samples: int = 8,
    rtol: float | None = None,
) -> SplitReport:
    """Say whether `step` gives the same in micro-batches, and which module or parameter differs.

    Runs forward and backward on a few samples of the batch, in one piece and in two (of unequal
    length, except of 2 or 4 samples), and compares loss, terms, gradients and buffers. The samples
    are those with the smallest and the largest values. Random numbers of torch are constant
    meanwhile, and dropout keeps everything. Gradients, buffers and random state are as before
    afterwards.

    Args:
        fn: as for `step`, and so are ``batch`` and the arguments up to ``out_dims``.
        batch: as for `step`; at least 2 samples, or 4 where a module such as BatchNorm needs 2.
        loss: as for `step`.
        weight: as for `step`.
        then: as for `step`.
        once: as for `step`.
        model: as for `step`.
        scaler: as for `step`.
        in_dims: as for `step`.
        out_dims: as for `step`.
        n_samples: the most samples to use.
        rtol: the largest relative error that passes; by default 1e-9 for float64, 1e-4 for float32
            and 1e-2 for less, where more passes that comes of rounding.

    Raises:
        AdaptiveUsageError: as for `step`, or there are too few samples.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from tenure.adaptive import check_split
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).double()
        >>> def loss_of(x):
        ...     return net(x).square().mean()
        >>> report = check_split(loss_of, torch.randn(8, 4, dtype=torch.float64))
        >>> report.ok, report.differences[0].name
        (False, 'net.1 (BatchNorm1d)')
    """
    spec = StepSpec(
        entry="check_split", fn=fn, batch=batch, loss=loss, weight=weight, then=then, once=once,
        model=model, batchnorm="per_chunk", scaler=scaler, in_dims=in_dims, out_dims=out_dims,
    )  # fmt: skip
    spec.check()
    parts = StepParts(spec)
    if parts.exchange.is_sharded:
        raise AdaptiveUsageError(
            "check_split() got a module of fully_shard, which rounds gradients as it exchanges "
            "them. Nothing was run. Call check_split() before fully_shard()."
        )
    n = min(checked_size("n_samples", n_samples), parts.n_samples)
    if n < (fewest := 2 * parts.smallest):
        needs = f", 2 in each part for {coupled_modules(parts.roots)[0]}" if fewest > 2 else ""
        raise AdaptiveUsageError(
            f"check_split() got {n} sample(s), and a split needs {fewest} at least{needs}."
        )
    # samples without their graph, which can run backward only once
    chosen = chosen_samples(parts.tree, parts.n_samples, n)
    parts = SampledStep(parts, is_asked=True).parts_of(chosen)
    sampled = SampledStep(parts, is_asked=True)

    def run(size: int) -> SampledRun:
        return sampled.observe(range(n), size, looks=True, watches=True)

    # In no scope: a cache that the model fills meanwhile is the user's, and goes on being used.
    # Compiled code shows no modules, and would be compiled for each of the sizes and modes.
    with not_compiling(), steps(f"check_split({parts.name})") as show:
        show("in one piece")
        whole = run(n)
        # unequal parts: where both are as long, a mean of means is the mean, and hides a wrong
        # weight
        show("in two pieces")
        split = run(min(-(-n * 5 // 8), n - 1))
        modules = first_module(whole, split, rtol or rtol_of(OUTPUTS, whole.rounded()))
        again = functools.partial(sampled.observe, range(n), n)
        agrees = rtol is None and Comparison(sampled).agree(whole, split, GRADIENTS, again)
        if rtol is None:
            rtol = rtol_of(GRADIENTS, whole.rounded())
        found = [] if agrees else differences(sampled, whole, split, rtol)
        advice = None
        if found:
            # where the whole does not agree with itself, no comparison with parts tells anything
            show("in one piece again")
            by_chance = differences(sampled, whole, run(n), rtol)
            if by_chance or sampled.has_others:
                error = max(each.relative_error for each in by_chance or found)
                found, modules = [SplitDifference("random", parts.name, error)], []
            elif not modules:
                show("with other declarations")
                is_of_outputs = callable(spec.loss)
                advice = of_outputs(sampled) if is_of_outputs else declaration_for(sampled, parts)
        return SplitReport(split.outcome.sizes, rtol, (*modules, *found), advice)


class Verification:
    """Refuses a split that differs from the whole, where it is time to look.

    Args:
        parts: the step.
    """

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts
        self._call: SplitCall | None = None
        # of a call that is due, until it is delivered
        self._due: Comparison | None = None
        self._could_compare = self._wants_whole = False

    def before_split(self, size: int) -> None:
        """Compare gradients of a few samples, if it is time; before anything else takes memory.

        Args:
            size: the samples of a micro-batch that is tried.

        Raises:
            SplitMismatchError: the micro-batches don't give what the whole gives.
        """
        parts = self._parts
        # another attempt of this call splits in another way, as right
        if self._call is not None or not 1 < parts.n_samples > size:
            return
        # without numbers there is nothing to compare; and a run of sharded modules may run out of
        # memory, but then no other pass could follow
        with without_functions():
            has_none = any(isinstance(value, Tensor) and value.is_meta for value in parts.values)
        if has_none or parts.exchange.is_sharded:
            return
        self._call = SplitCall(parts)
        if not self._call.is_due:
            return
        step = SampledStep(parts)
        self._due = comparison = Comparison(step)
        # a graph for each of its sizes and modes would cost minutes
        with not_compiling():
            self._could_compare = comparison.samples()
            # the loss of lazy() runs once, with all outputs
            is_users = parts.spec.entry != "lazy" and not step.has_others
            is_asked = comparison.mismatch is None and step.kept and is_users
            if is_asked and not comparison.own_loss():
                warn_user(
                    f"{parts.name!r} keeps what it computes, so loss= was compared on a few "
                    "samples, and it remembers them outside of modules. Keep that in buffers of "
                    "a module, which are restored, or pass verify=False.",
                    AdaptiveUsageWarning,
                )
            step.forget()
            if comparison.hands_on:
                names = sorted(step.kept)
                raise BatchCoupledError(
                    f"The batch of {step.n_samples} has to be split into micro-batches of {size}, "
                    "and each would read what the one before has written into "
                    f"{listed(names, most=6)}. Nothing was changed. {UPDATE_AFTER}",
                    tuple(names),
                )
            if step.refused is not None:
                raise step.refused.with_traceback(None)
            if step.is_random and parts.compiled and draws_again_in_backward():
                raise _drawn_again_error(parts.name)
            found = comparison.mismatch
            self._wants_whole = not comparison.is_coupled
            # other numbers for the parts than for the whole explain any difference; and the same
            # factor for both, which may be nearly 0 or 1 this time, hides one
            is_clear = comparison.is_coupled or comparison.remembers
            if step.has_others and self._could_compare and not is_clear:
                self._wants_whole = found is None
                self._could_compare, found = exchanged(step)
            self._refuse(found, step, size, _UPDATE_AFTER if comparison.remembers else None)
            if comparison.kept:
                warn_user(
                    f"{parts.name!r} sets {listed(sorted(comparison.kept), most=3)}, and runs in "
                    "micro-batches: what it assigns stays that of the last one, and what it counts "
                    "is counted for each. Set it once for the batch, as in on_train_batch_end().",
                    AdaptiveUsageWarning,
                )

    def before_delivery(self, outcome: StepOutcome) -> None:
        """Compare the loss of the whole batch, if it is time, before gradients are delivered.

        Args:
            outcome: what the micro-batches gave.

        Raises:
            SplitMismatchError: it is not what the whole gives.
            AdaptiveUsageError: ``backward=`` has scaled the micro-batches differently.
        """
        call, parts, size = self._call, self._parts, max(outcome.sizes)
        comparison, self._due = self._due, None
        if call is None:
            return
        if parts.spec.entry != "lazy":
            self._check_counts(call, size)
        if comparison is None:
            return
        parts.backward.check_linear()
        step = comparison.step
        # a batch that the micro-batches have written into is no longer the one they ran on
        if self._wants_whole and parts.inputs.written() is None:
            most = step.n_samples if call.is_first or not step.is_random else step.n_samples // 2
            with not_compiling():
                self._could_compare |= comparison.losses(outcome, most)
                self._refuse(comparison.mismatch, step, size)
        if not self._could_compare:
            # what was wrong once may be wrong again, and nothing tells that it is not
            if call.program.refusal is not None:
                raise SplitMismatchError(*call.program.refusal)
            # what lazy() splits by is no claim of the user's, who could do nothing about it
            if parts.spec.entry == "step":
                warn_user(
                    f"step() split a batch of {parts.n_samples}, and could not verify that "
                    f"{parts.name!r} gives the same in micro-batches: it ran neither on fewer "
                    "samples nor on more. Ask check_split() where there is memory, and pass "
                    "verify=False.",
                    AdaptiveUsageWarning,
                )
        call.note_verified(step.n_run)

    def _check_counts(self, call: SplitCall, size: int) -> None:
        """Look at counts in each call, because a clamped one is wrong only where it is low."""
        for lowest in _lowest_counts(self._parts.divisors):
            if not call.wants_count(lowest.name, lowest.value, 4 * lowest.chunk.length):
                continue
            if self._parts.inputs.written() is not None:
                return
            step = SampledStep(self._parts)
            with not_compiling():
                checked = first_that_fits(functools.partial(_checked, step, lowest), (1,))
            known, found = checked or (lowest.value, None)
            self._refuse(found, step, size, DO_NOT_CLAMP)
            call.note_count(lowest.name, known, step.n_run)

    def _refuse(
        self, found: Mismatch | None, step: SampledStep, size: int, advice: str | None = None
    ) -> None:
        if found is None:
            return
        assert self._call is not None
        if advice is None:
            is_tiny = found.error <= _TINY
            advice = _OF_AN_EPSILON if is_tiny else advice_for(step, self._parts)
        self._call.program.refusal = (
            f"The batch of {step.n_samples} has to be split into micro-batches of {size}, and "
            f"{self._parts.name!r} would give other results then: {found.text}. Gradients and "
            f"modules are as before. {advice}",
            found.whole,
            found.split,
            advice,
        )
        raise SplitMismatchError(*self._call.program.refusal)


class _LowestCount(NamedTuple):
    """The micro-batch with the lowest count of a split.

    Attributes:
        name: the term.
        value: its count.
        tolerance: how much more it may count without changing the loss by more than rounding does.
        chunk: its samples.
        other: those of the one that counts most.
    """

    name: str | None
    value: float
    tolerance: float
    chunk: Chunk
    other: Chunk


def _lowest_counts(divisors: Divisors) -> Iterator[_LowestCount]:
    """Yield the lowest count of each term; the host waits for a device once."""
    named = [(name, chunk) for chunk, counts in divisors.items() for name in counts]
    given = [divisors[chunk][name] for name, chunk in named]
    is_coarse = any(isinstance(each, Tensor) and each.dtype in _COARSE for each in given)
    columns: dict[str | None, list[tuple[float, Chunk]]] = {}
    for (name, chunk), value in zip(named, read_numbers(given), strict=True):
        number = plain_number(value)
        if number is not None and math.isfinite(number):
            columns.setdefault(name, []).append((number, chunk))
    for name, column in columns.items():
        # the largest of those that are as low: one sample has no halves
        count, chunk = min(column, key=lambda each: (each[0], -each[1].length))
        others = [each for each in column if each[1] != chunk]
        n_as_low = sum(each == count for each, _ in column)
        tolerance = _COUNT_RTOL[is_coarse] * math.fsum(each for each, _ in column) / n_as_low
        # a clamped count of 0 adds no more than itself
        if others and not 0 < count <= tolerance:
            yield _LowestCount(name, count, tolerance, chunk, max(others)[1])


def _checked(step: SampledStep, lowest: _LowestCount, _: int) -> tuple[float, Mismatch | None]:
    """Return the lowest count that is known not to be clamped, and a count that is clamped."""
    name, n, n_other = lowest.name, lowest.chunk.length, lowest.other.length
    chunk, other = (
        [*range(each.start, each.start + each.length)] for each in (lowest.chunk, lowest.other)
    )

    def count(indices: list[int]) -> float:
        return step.counts(indices)[name]

    here, middle = min(count(chunk), lowest.value), n // 2
    # samples of one group would get the numbers of those of another one
    if step.draws_elsewhere:
        return here, None
    if middle and (half := min(count(chunk[:middle]), count(chunk[middle:]))) < here:
        return half, None
    there, both = count(other), count([*chunk, *other])
    if here + there - both <= lowest.tolerance:
        return here, None
    what = "the count" if name in (None, ONLY) else f"the count of {name!r}"
    error = (here + there) / both - 1 if both else math.inf
    return here, mismatch(what, both, here + there, error, (n, n_other))


def _drawn_again_error(name: str) -> AdaptiveUsageError:
    return AdaptiveUsageError(
        f"{name!r} draws random numbers in compiled code, and torch._functorch.config."
        "activation_memory_budget is below 1: torch may then draw others in the backward pass, "
        "which gives wrong gradients, of the whole batch as well. Set it to 1, and save "
        "activations with torch.utils.checkpoint; where your torch draws the same numbers, pass "
        "verify=False."
    )
