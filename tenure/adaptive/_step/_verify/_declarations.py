"""Declarations that make a loss right: each is tried out on a few samples before it is named."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from ..._undo import named_modules
from .._parts import StepParts
from ._compare import CHECKED, DECLARED
from ._comparison import split_values
from ._count_check import DO_NOT_CLAMP, is_clamped
from ._observed import first_module
from ._subject import Subject, chosen_samples, first_that_fits, spread_samples

# Unequal ones, and an equal one: a mean of means is right for equal parts by accident.
_SPLITS = ((5, 3), (3, 5), (4, 4))
_N_SAMPLES = 8
# torch's own, what other libraries take, padding, and the void of segmentation masks.
_IGNORED = (-100, -1, 0, 255)
_Curve = Callable[[float], float]
_CURVES: dict[str, tuple[str, _Curve]] = {
    "then=torch.sqrt": ("without the root", lambda value: value**2),
    "then=torch.log": ("without the logarithm", math.exp),
    "then=torch.exp": ("without the exponential", math.log),
}
_OUTPUTS = (
    "Return the outputs, one for each sample, and pass what is computed of all of them as loss=: "
    "step(lambda batch: model(...), batch, loss=lambda outputs: ...). Or return the loss as a pair "
    "(sum, count) or a dict of pairs, one for each term that has another denominator. Pass a "
    "penalty on parameters as once=. Mix samples, as in mixup, before step()."
)


class _Runs(NamedTuple):
    """The losses of runs of samples, which tell what kind of loss it is.

    Attributes:
        values: by start and end of the run.
        splits: runs from the first sample on that were cut in two, by the lengths of both parts.
        rtol: how far apart two of them may be that are the same.
    """

    values: Mapping[tuple[int, int], float]
    splits: Sequence[tuple[int, int]]
    rtol: float

    def add_up(self, weights: Tensor | None, curve: _Curve = float) -> bool:
        """Return whether a curve of each value is the mean of its parts by the weights of samples.

        Args:
            weights: one for each sample; None asks for the sum of the parts.
            curve: the inverse of the function that a sum or mean went through.
        """
        try:
            for a, b in self.splits:
                whole, *parts = (curve(self.values[r]) for r in ((0, a + b), (0, a), (a, a + b)))
                shares = [1.0, 1.0]
                if weights is not None:
                    counts = [float(weights[:a].sum()), float(weights[a : a + b].sum())]
                    shares = [count / sum(counts) for count in counts]
                if not self._agree(whole, parts[0] * shares[0] + parts[1] * shares[1]):
                    return False
        except (ValueError, OverflowError, ZeroDivisionError):
            return False
        return True

    @property
    def count_apart(self) -> bool:
        """True if both parts of some run count."""
        values = self.values
        return any(values[0, a] and values[a, a + b] for a, b in self.splits)

    def _agree(self, a: float, b: float) -> bool:
        return abs(a - b) <= self.rtol * max(abs(a), abs(b))


def advice_for(subject: Subject, parts: StepParts) -> str:
    """Return the declarations that may help, as sentences."""
    spec = parts.spec
    # with a loss of outputs only the outputs can be wrong, and so a module or the function
    if callable(spec.loss):
        return _of_module(subject) or (
            "What it returns for a sample depends on the other samples of its batch: let it return "
            "what each sample gives alone, and do the rest in loss=, which gets all outputs."
        )
    if is_clamped(subject):
        return DO_NOT_CLAMP
    if declared := declaration_for(subject, parts) or _of_router(parts):
        return declared
    return f"{_of_module(subject)} {_OUTPUTS}".lstrip()


def _of_router(parts: StepParts) -> str:
    """Return the advice for a mixture of experts with a router loss of transformers, or ""."""
    for _, module in named_modules(parts.roots):
        config = getattr(module, "config", None)
        if getattr(config, "output_router_logits", False):
            return (
                f"{type(module).__name__} adds a router loss over all tokens of its batch, which "
                "no weight makes right: train without output_router_logits, or return the outputs "
                "of samples, and pass what is computed of all of them as loss=."
            )
    return ""


def declaration_for(subject: Subject, parts: StepParts) -> str | None:
    """Return the declaration that makes the samples that were looked at right, if one does."""
    return first_that_fits(lambda _: _declared(subject, parts), (1,)) or None


def _declared(subject: Subject, parts: StepParts) -> str:
    spec, n = parts.spec, min(_N_SAMPLES, subject.n_samples)
    indices = chosen_samples(subject.tree, subject.n_samples, n)
    runs = _runs_of(subject, indices)
    if runs is None:
        return ""
    if spec.loss != "sum" and runs.add_up(None):
        # a masked mean is one as well while one part alone has samples that count
        spread = _runs_of(subject, spread_samples(subject.tree, subject.n_samples, n))
        if spread and spread.add_up(None) and (runs.count_apart or spread.count_apart):
            return 'It is a sum over samples, not a mean: pass loss="sum".'
    equal = torch.ones(n)
    if (spec.weight is not None or spec.loss == "sum") and runs.add_up(equal):
        told = "weight=" if spec.weight is not None else 'loss="sum"'
        return f"It is a mean over samples: leave {told} out."
    instead = ', and leave loss="sum" out' if spec.loss == "sum" else ""
    for shown, counts in chain(_counts(subject, indices), _class_weights(subject, parts, indices)):
        if runs.add_up(counts.reshape(n, -1).sum(1).double()):
            return (
                "It is a mean over something else than samples. Declare what it divides by"
                f"{instead}: weight=lambda batch: {shown} "
                "(with it the samples that were looked at agree)."
            )
    for shown, (how, inverse) in _CURVES.items():
        for loss, weights in (("mean", equal), ("sum", None)):
            if (loss == "mean" or runs.count_apart) and runs.add_up(weights, inverse):
                return (
                    f"It is a function of a {loss}: return that {how}, and pass "
                    f'loss="{loss}", {shown}.'
                )
    return ""


def _runs_of(subject: Subject, indices: list[int]) -> _Runs | None:
    """Return the losses of runs of some samples; None if those can't be compared."""
    n = len(indices)
    splits = [(a, b) for a, b in _SPLITS if a + b == n] or [(n - 1, 1), (1, n - 1)]
    # all runs that any candidate needs, so that each is run once
    starts = [(0, n), *((0, a) for a, _ in splits), *((a, n) for a, _ in splits)]
    losses = {(start, end): _loss_of(subject, indices[start:end]) for start, end in starts}
    values = {run: float(loss) for run, loss in losses.items()}
    # parts without a valid label have no mean, and the others may still tell
    splits = [(a, b) for a, b in splits if math.isfinite(values[0, a] + values[a, n])]
    if not splits or not math.isfinite(values[0, n]) or not any(values.values()):
        return None
    return _Runs(values, splits, DECLARED.of(losses.values()))


def _loss_of(subject: Subject, indices: list[int]) -> Tensor:
    parts = subject.parts_of(indices)
    with subject.comparable(parts):
        outcome = split_values(parts, [parts.n_samples])
    if len(outcome.terms) > 1:
        # each may need a weight of its own
        raise ValueError("several terms")
    return outcome.loss


def _counts(subject: Subject, indices: list[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield what losses often divide by, as code, and its numbers for the samples."""
    for name, values in _tensors_of(subject, indices):
        # language models predict the next token, so the first label of each row is not counted
        shifted = f"{name}[:, 1:]"
        if bool(((values == 0) | (values == 1)).all()):
            yield f"{name}.sum()", values
            if values.dim() > 1:
                yield f"{shifted}.sum()", values[:, 1:]
        elif not values.is_floating_point():
            for ignored in _IGNORED:
                valid = values != ignored
                if not bool(valid.all()):
                    if values.dim() > 1:
                        yield f"({shifted} != {ignored}).sum()", valid[:, 1:]
                    yield f"({name} != {ignored}).sum()", valid


def _class_weights(
    subject: Subject, parts: StepParts, indices: list[int]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of the classes of labels, which ``cross_entropy(weight=w)`` divides by."""
    found = parts.outside | {
        f"{name}.weight": module._buffers.get("weight")
        for name, module in named_modules(parts.roots)
    }
    vectors = {
        name: each.detach().cpu().double()
        for name, each in found.items()
        if each is not None and each.is_floating_point() and each.dim() == 1
    }
    for path, labels in _tensors_of(subject, indices):
        for name, weights in vectors.items() if labels.dtype is torch.int64 else ():
            valid = (labels >= 0) & (labels < len(weights))
            shown = path
            if not bool(valid.all()):
                shown = f"{path}[{path} != {int(labels[~valid].flatten()[0])}]"
            yield f"{name}[{shown}].sum()", weights[labels.clamp(0, len(weights) - 1)] * valid


def _tensors_of(subject: Subject, indices: list[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield the samples of the tensors of the batch, by the path of each."""
    for leaf in subject.tree.leaves:
        # the code that is shown indexes the first dimension
        if isinstance(leaf.value, Tensor) and leaf.dim == 0:
            yield leaf.path, leaf.value.detach()[indices].cpu()


# --- modules


def _of_module(subject: Subject) -> str:
    """Return the first module whose output for a sample depends on others."""

    def look(n: int) -> str:
        indices = chosen_samples(subject.tree, subject.n_samples, n)
        # unequal parts again, and the whole in the same way, with the same numbers
        whole, split = (
            subject.observe(indices, size, watches=True) for size in (n, -(-n * 5 // 8))
        )
        if whole is None or split is None:
            return ""
        rtol = CHECKED.of([*whole.tensors(), *(call.output for call in whole.calls)])
        found = first_module(whole, split, rtol)
        if not found:
            return ""
        return (
            f"{found[0].name} mixes the samples of its batch: freeze it with eval(), or replace it."
        )

    return first_that_fits(look, [min(_N_SAMPLES, subject.n_samples)]) or ""
