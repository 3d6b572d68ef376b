"""One architecture at one size: the truth, what is predicted, and how long both take."""

from __future__ import annotations

import gc
import importlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from benchmarks._naive_prediction import naive_peak
from benchmarks._step_truth import Truth, true_peak
from benchmarks._training_steps import Architecture, Step
from tenure import adaptive

_T = TypeVar("_T")
_SEED = 0


@dataclass(frozen=True, slots=True)
class Case:
    """What was found out about one architecture at one size; bytes, and seconds.

    Attributes:
        name: of the architecture.
        family: of the architecture.
        size: in the word of the architecture.
        true_bytes: the peak of the step that ran; 0 if it did not.
        kept_bytes: what lives on after it, or 0.
        unseen_bytes: by how much the allocator's count differs from its events; 0 is none.
        step_s: how long it took.
        predicted_bytes: what tenure predicts; None if it refused.
        approximate: whether it says that this is not exact.
        reasons: why, in its words; the error where it refused.
        predict_s: how long it took.
        naive_bytes: what fake tensors alone tell; None if they raised.
        naive_error: the error they raised.
        kitsune_bytes: what torch-kitsune predicts; None if it is not there or raised.
        failure: why there is no truth.
    """

    name: str
    family: str
    size: int
    true_bytes: int = 0
    kept_bytes: int = 0
    unseen_bytes: int = 0
    step_s: float = 0.0
    predicted_bytes: int | None = None
    approximate: bool = False
    reasons: tuple[str, ...] = ()
    predict_s: float = 0.0
    naive_bytes: int | None = None
    naive_error: str = ""
    kitsune_bytes: int | None = None
    failure: str = ""

    @property
    def error(self) -> float | None:
        """How far tenure's prediction is off, as a share of the truth; negative if too low."""
        return self.error_of(self.predicted_bytes)

    def error_of(self, predicted_bytes: int | None) -> float | None:
        """The same of any prediction."""
        if predicted_bytes is None or not self.true_bytes:
            return None
        return predicted_bytes / self.true_bytes - 1


def measure(what: Architecture, size: int, *, with_kitsune: bool) -> Case:
    """Predict a step in each way, and run it; each time on a model made anew from one seed.

    tenure's prediction and the truth share one model and one optimizer, as they do in a program.
    """
    case, _ = _attempt(lambda: _ours(what, size))
    if case is None:
        _, why = _attempt(lambda: _build(what, size))
        return Case(what.name, what.family, size, failure=why or "it is not built twice alike")
    gc.collect()
    # these come after it: the truth is a first step
    naive, naive_error = _attempt(lambda: naive_peak(_build(what, size), what.make_optimizer))
    kitsune, _ = _attempt(lambda: _kitsune(what, size)) if with_kitsune else (None, "")
    gc.collect()
    return replace(case, naive_bytes=naive, naive_error=naive_error, kitsune_bytes=kitsune)


def _ours(what: Architecture, size: int) -> Case:
    """Tenure's prediction, then the truth."""
    step = _build(what, size)
    optimizer = what.make_optimizer(step.model.parameters())
    started = time.perf_counter()
    predicted, refusal = _attempt(lambda: _predict(step, optimizer))
    predict_s = time.perf_counter() - started
    torch.manual_seed(_SEED)
    truth, failure = _attempt(lambda: true_peak(step, optimizer))
    if truth is None:
        truth = Truth(0, 0, 0, 0, 0.0)
    peak_bytes, approximate, reasons = predicted or (None, False, (refusal,))
    return Case(
        what.name,
        what.family,
        size,
        true_bytes=truth.peak_bytes,
        kept_bytes=truth.kept_bytes,
        unseen_bytes=truth.unseen_bytes,
        step_s=truth.elapsed_s,
        predicted_bytes=peak_bytes,
        approximate=approximate,
        reasons=reasons,
        predict_s=predict_s,
        failure=failure,
    )


def _build(what: Architecture, size: int) -> Step:
    torch.manual_seed(_SEED)
    return what.build(size)


def _predict(step: Step, optimizer: Any) -> tuple[int, bool, tuple[str, ...]]:
    report = adaptive.predict_peak(step.fn, *step.args, optimizer=optimizer)
    return report.peak_bytes, report.approximate, tuple(map(str, report.reasons))


def _kitsune(what: Architecture, size: int) -> int:
    """torch-kitsune's prediction from the model and the shape of its first input, as it wants."""
    predict_memory: Any = importlib.import_module("kitsune.predict").predict_memory
    step = _build(what, size)
    first = next(leaf for leaf in tree_leaves(step.args) if isinstance(leaf, Tensor))
    batch_size, *shape = first.shape
    name = "sgd" if "SGD" in what.name else "adamw"
    predicted: int = predict_memory(
        step.model, tuple(shape), batch_size, "float32", name
    ).total_bytes
    return predicted


def _attempt(call: Callable[[], _T]) -> tuple[_T | None, str]:
    try:
        return call(), ""
    # whatever an architecture or a predictor raises is a result here
    except Exception as error:
        text = " ".join(str(error).split())
        return None, f"{type(error).__name__}: {text[:300]}"


def errors(cases: Iterable[Case], of: Callable[[Case], int | None]) -> list[float]:
    """The errors of a prediction where it predicts something."""
    found = (case.error_of(of(case)) for case in cases)
    return [error for error in found if error is not None]
