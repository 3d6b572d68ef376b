"""What `check_split` found, and how it is printed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from tenure._show import Report

DifferenceKind = Literal["module", "buffer", "loss", "term", "gradient", "random"]

_ADVICE = {
    "module": "the module mixes the samples of its batch: freeze it, replace it, or keep the batch "
    "whole",
    "buffer": "a module keeps track of its batches, and sees several smaller ones: freeze it, "
    'replace it, or accept that with batchnorm="per_chunk"',
    "loss": "no module differs, so the loss itself mixes samples, or its weight is wrong: see "
    "weight=, and pass a loss on outputs as loss=",
    "random": "the function draws random numbers outside of dropout modules, so that no two runs "
    "agree: check it with those turned off",
}


@dataclass(frozen=True, slots=True)
class SplitDifference:
    """One thing that a split changes.

    Attributes:
        kind: ``"module"``: the first module whose output for a sample depends on other samples;
            ``"buffer"``; ``"loss"`` or one ``"term"`` of it; ``"gradient"`` of a parameter or of a
            tensor of the batch; ``"random"``: two runs on the whole batch differ already.
        name: which one, such as ``"net.1 (BatchNorm1d)"``.
        relative_error: the largest difference divided by the largest value.
    """

    kind: DifferenceKind
    name: str
    relative_error: float

    def __str__(self) -> str:
        return f"{self.kind:<8}  {self.relative_error:10.1e}  {self.name}"


@dataclass(frozen=True, slots=True)
class SplitReport(Report):
    """Whether a step gives the same result in micro-batches; true if it does.

    Attributes:
        sizes: the samples in each micro-batch of the split run, in order.
        rtol: the largest relative error that passes.
        differences: what is off by more, the causes first.
    """

    sizes: tuple[int, ...]
    rtol: float
    differences: tuple[SplitDifference, ...]

    _figures: ClassVar = ("ok",)

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        how = f"{sum(self.sizes)} samples as {' + '.join(map(str, self.sizes))}"
        if self.ok:
            return f"{how}: the same loss, gradients and buffers as in one piece."
        lines = [f"{how}: not the same as in one piece.", "what      rel. error  which"]
        lines += map(str, self.differences)
        kinds = dict.fromkeys(difference.kind for difference in self.differences)
        cause = next((kind for kind in kinds if kind in _ADVICE), None)
        return "\n".join([*lines, f"That means: {_ADVICE[cause]}."] if cause else lines)
