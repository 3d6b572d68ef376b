"""The report of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tenure._show import Paragraph, Part, Report
from tenure._text import counted, format_bytes

from .._predict import Advised


@dataclass(frozen=True, slots=True)
class Plan(Advised, Report):
    """The largest micro-batches with which a step fits.

    Attributes:
        micro_batch: the most samples in one, for ``step(..., maximum=plan.micro_batch)``. With
            ``batchnorm="per_chunk"`` the last one may have one more, as there.
        n_samples: the samples of the batch.
        sizes: the samples of each micro-batch, in order.
        peak_bytes: what is alive at the worst moment of the step, with what was there before.
        needed_bytes: what the device has to have for it: on the CPU the peak; on an accelerator
            what its allocator reserves, and the allowance for kernels. It can be above the budget
            where the allocator has enough once it gives back what it caches.
        budget_bytes: what there may be, with what was there before; the margin is taken off.
        baseline_bytes: what was there before.
        categories: what is alive at the worst moment, by what it is for.
        device: whose memory it is.
        approximate: whether the figures may be wrong.
        reasons: why.
    """

    micro_batch: int
    n_samples: int
    sizes: tuple[int, ...]
    peak_bytes: int
    needed_bytes: int
    budget_bytes: int
    baseline_bytes: int
    categories: Mapping[str, int]
    device: str
    approximate: bool
    reasons: tuple[str, ...]

    def _parts(self) -> list[Part]:
        needed, budget = format_bytes(self.needed_bytes), format_bytes(self.budget_bytes)
        head = f"{counted(self.n_samples, 'sample')} in {micro_batches(self.sizes)}: "
        if self.needed_bytes > self.budget_bytes:
            head += (
                f"peak {format_bytes(self.peak_bytes)} of {budget} on {self.device}. The allocator "
                f"would cache up to {needed}, and gives the rest back when memory runs out"
            )
        else:
            head += f"{needed} of {budget} on {self.device}"
        approximately = [f"approximate: {reason}" for reason in self.reasons]
        lines = [head, f"  {by_category(self.categories)}", *approximately]
        return [Paragraph("", "\n".join(lines))]


def micro_batches(sizes: tuple[int, ...]) -> str:
    """Spell how a batch is cut.

    Example:
        >>> micro_batches((4, 4, 2)), micro_batches((8,))
        ('3 micro-batches of up to 4', 'one micro-batch of 8')
    """
    if len(sizes) == 1:
        return f"one micro-batch of {sizes[0]}"
    up_to = "" if len(set(sizes)) == 1 else "up to "
    return f"{len(sizes)} micro-batches of {up_to}{max(sizes)}"


def by_category(categories: Mapping[str, int]) -> str:
    """Spell what memory is for, the most first."""
    most_first = sorted(categories.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {format_bytes(n)}" for name, n in most_first if n)
