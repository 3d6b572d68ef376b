"""What to declare instead: tried out on a few samples, so that what is named does make it right."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from ..._reachable import named_modules
from .._check import DECLARED, IT_IS_A_SUM, default_rtol, first_module, mixed_input, observed_run
from .._loss import ONLY
from .._samples import Leaf
from .._split import StepParts, StepSpec
from ._count_check import DO_NOT_CLAMP, is_clamped
from ._loss_check import whole_values
from ._subject import Subject, chosen_samples, comparable, first_that_fits, spread_samples

# Unequal ones, and an equal one: a mean of means is right for equal parts by accident.
_SPLITS = ((5, 3), (3, 5), (4, 4))
_N_SAMPLES = 8
# torch's own, what other libraries take, padding, and the void of segmentation masks.
_IGNORED = (-100, -1, 0, 255)
_Run = tuple[int, int]
_Curve = Callable[[float], float]
_CURVES: dict[str, tuple[str, _Curve]] = {
    "then=torch.sqrt": ("without the root", lambda value: value**2),
    "then=torch.log": ("without the logarithm", math.exp),
    "then=torch.exp": ("without the exponential", math.log),
}
_MIXED = "The function mixes samples before"
_OUTPUTS = (
    "Return the outputs, one for each sample, and pass what is computed of all of them as loss=: "
    "step(lambda batch: model(...), batch, loss=lambda outputs: ...). Or return the loss as a pair "
    "(sum, count) or a dict of pairs, one for each term that has another denominator."
)


class Runs:
    """The values of a function for runs of samples, which tell what kind of loss it is.

    Args:
        values: by start and end of the run.
        splits: runs from the first sample on that were cut in two, by the lengths of both parts.
        rtol: how far apart two of them may be that are the same.
    """

    def __init__(
        self, values: Mapping[_Run, float], splits: Sequence[tuple[int, int]], rtol: float
    ) -> None:
        self._values = values
        self._splits = splits
        self._rtol = rtol

    def are_means(self, weight: Callable[[int, int], float], of: _Curve = float) -> bool:
        """Whether a curve of each value is the mean, so weighted, of that of its parts."""

        def is_mean(a: int, b: int) -> bool:
            weights = weight(0, a), weight(a, a + b)
            total = of(self._values[0, a]) * weights[0] + of(self._values[a, a + b]) * weights[1]
            return self._agree(of(self._values[0, a + b]), total / sum(weights))

        return self._holds(is_mean)

    def are_sums(self, of: _Curve = float) -> bool:
        """Whether a curve of each value is the sum of that of its parts."""

        def is_sum(a: int, b: int) -> bool:
            parts = of(self._values[0, a]) + of(self._values[a, a + b])
            return self._agree(of(self._values[0, a + b]), parts)

        return self._holds(is_sum)

    @property
    def count_apart(self) -> bool:
        """Whether both parts of some run count."""
        values = self._values
        return any(values[0, a] and values[a, a + b] for a, b in self._splits)

    def repeated(self) -> float | None:
        """What is in each value once, beside a sum over samples."""
        values = self._values
        found = [values[0, a] + values[a, a + b] - values[0, a + b] for a, b in self._splits]
        # of one split, any number would do
        if len(found) > 1 and self._agree(min(found), max(found), max(map(abs, found))):
            return found[0]
        return None

    def _holds(self, relation: Callable[[int, int], bool]) -> bool:
        try:
            return all(relation(a, b) for a, b in self._splits)
        except (ValueError, OverflowError, ZeroDivisionError):
            return False

    def _agree(self, a: float, b: float, scale: float = 0.0) -> bool:
        return abs(a - b) <= self._rtol * max(abs(a), abs(b), scale)


def advice_for(subject: Subject, parts: StepParts) -> str:
    """What the user can declare, as sentences."""
    spec = parts.spec
    # with a loss of outputs only the outputs can be wrong, and so a module or the function
    if callable(spec.loss):
        return _of_module(subject) or (
            "What it returns for a sample depends on the other samples of its batch: let it return "
            "what each sample gives alone, and do the rest in loss=, which gets all outputs."
        )
    if is_clamped(subject):
        return DO_NOT_CLAMP
    declared = first_that_fits(lambda _: _declared(subject, parts), (1,))
    numbered = _of_transformers(parts, subject)
    if declared:
        return f"{declared} {numbered}".rstrip()
    module = _of_module(subject)
    # outputs of mixed samples are no help
    if module.startswith(_MIXED):
        return module
    return f"{module} {numbered or _OUTPUTS}".lstrip()


def _declared(subject: Subject, parts: StepParts) -> str:
    """The declaration that makes the samples that were looked at right; "" for none."""
    n = min(_N_SAMPLES, subject.n_samples)
    indices = chosen_samples(subject.tree, subject.n_samples, n)
    runs = _runs_of(subject, indices)
    if runs is None:
        return ""
    if parts.spec.loss != "sum" and runs.are_sums():
        # a masked mean is one as well while one part alone has samples that count
        spread = _runs_of(subject, spread_samples(subject.tree, subject.n_samples, n))
        if spread is not None and spread.are_sums() and (runs.count_apart or spread.count_apart):
            return IT_IS_A_SUM
    candidates = chain(
        _undeclared(parts.spec, runs), _weighted(subject, parts, indices, runs), _curved(runs)
    )
    return next(candidates, "")


def _runs_of(subject: Subject, indices: list[int]) -> Runs | None:
    """The losses of runs of some samples; None if those can't be compared."""
    n = len(indices)
    splits = [(a, b) for a, b in _SPLITS if a + b == n] or [(n - 1, 1), (1, n - 1)]
    # all runs that any candidate needs, so that each is run once
    starts = [(0, n), *((0, a) for a, _ in splits), *((a, n) for a, _ in splits)]
    losses = {(start, end): _loss_of(subject, indices[start:end]) for start, end in starts}
    values = {run: float(loss) for run, loss in losses.items()}
    if not any(values.values()):
        return None
    if any(not math.isfinite(value) for value in values.values()):
        # parts without a valid label have no mean, and the others may still tell
        splits = [(a, b) for a, b in splits if math.isfinite(values[0, a] + values[a, n])]
        if not splits or not math.isfinite(values[0, n]):
            return None
    return Runs(values, splits, DECLARED.of(losses.values()))


def _n_samples(start: int, end: int) -> float:
    return end - start


def _undeclared(spec: StepSpec, runs: Runs) -> Iterator[str]:
    """What is right without what was declared, or with a word more."""
    is_declared = spec.weight is not None or spec.loss == "sum"
    if is_declared and runs.are_means(_n_samples):
        told = "weight=" if spec.weight is not None else 'loss="sum"'
        yield f"It is a mean over samples: leave {told} out."
    # beside a sum it is there with nothing in it
    repeated = runs.repeated() if spec.loss == "sum" and not runs.are_sums() else None
    if repeated is not None:
        yield (
            f"It has a part of {repeated:.6g} that is there once for each micro-batch, such as a "
            "penalty on parameters: return the rest, and pass that part as once=lambda: penalty()."
        )


def _weighted(subject: Subject, parts: StepParts, indices: list[int], runs: Runs) -> Iterator[str]:
    of_classes = _class_weights(subject, _vectors_of(parts), indices)
    instead = ', and leave loss="sum" out' if parts.spec.loss == "sum" else ""
    for shown, counted in chain(_weights(subject, indices), of_classes):
        if runs.are_means(counted):
            yield (
                "It is a mean over something else than samples. Declare what it divides by"
                f"{instead}: weight=lambda batch: {shown} "
                "(with it the samples that were looked at agree)."
            )


def _curved(runs: Runs) -> Iterator[str]:
    for shown, (how, inverse) in _CURVES.items():
        for loss in ("mean", "sum"):
            is_mean = loss == "mean"
            is_sum = runs.count_apart and runs.are_sums(inverse)
            if runs.are_means(_n_samples, inverse) if is_mean else is_sum:
                yield (
                    f"It is a function of a {loss}: return that {how}, and pass "
                    f'loss="{loss}", {shown}.'
                )


def _loss_of(subject: Subject, indices: list[int]) -> Tensor:
    parts = subject.parts_of(indices)
    with comparable(parts, is_random=subject.is_random):
        values = whole_values(parts)
    if len(values) > 1:
        # each may need a weight of its own
        raise ValueError("several terms")
    return values[ONLY]


def _weights(
    subject: Subject, indices: list[int]
) -> Iterator[tuple[str, Callable[[int, int], float]]]:
    """Numbers that losses often divide by, as code, and what they are for runs of the samples."""
    for leaf in subject.tree.leaves:
        # the code that is shown indexes the first dimension
        if not isinstance(leaf.value, Tensor) or leaf.dim != 0:
            continue
        values = leaf.value.detach()[indices].cpu()
        for shown, counts in _counts(leaf, values):
            counted = counts.reshape(len(indices), -1).sum(1).double()
            yield shown, functools.partial(_sum_of_run, counted)


def _vectors_of(parts: StepParts) -> dict[str, Tensor]:
    """What may be weights of classes: what the function captures, and what its losses have."""
    losses = named_modules(parts.roots)
    found = parts.outside | {
        f"{name}.weight": weight
        for name, module in losses
        if isinstance(weight := module._buffers.get("weight"), Tensor)
    }
    return {
        name: each for name, each in found.items() if each.is_floating_point() and each.dim() == 1
    }


def _class_weights(
    subject: Subject, vectors: Mapping[str, Tensor], indices: list[int]
) -> Iterator[tuple[str, Callable[[int, int], float]]]:
    """The weights of the classes of labels, as ``cross_entropy(weight=w)`` divides by them."""
    for leaf in subject.tree.leaves:
        value = leaf.value
        is_labels = isinstance(value, Tensor) and leaf.dim == 0 and value.dtype is torch.int64
        if not is_labels:
            continue
        labels = value.detach()[indices].cpu()
        for name, vector in vectors.items():
            weights = vector.detach().cpu().double()
            valid = (labels >= 0) & (labels < len(weights))
            picked = weights[labels.clamp(0, len(weights) - 1)] * valid
            shown = f"{name}[{leaf.path}]"
            if not bool(valid.all()):
                ignored = int(labels[~valid].flatten()[0])
                shown = f"{name}[{leaf.path}[{leaf.path} != {ignored}]]"
            counted = picked.reshape(len(indices), -1).sum(1)
            yield f"{shown}.sum()", functools.partial(_sum_of_run, counted)


def _sum_of_run(counted: Tensor, start: int, end: int) -> float:
    return float(counted[start:end].sum())


def _counts(leaf: Leaf, values: Tensor) -> Iterator[tuple[str, Tensor]]:
    name = leaf.path
    # language models predict the next token, so the first label of each row is not counted
    shifted = f"{name}[:, 1:]"
    is_mask = bool(((values == 0) | (values == 1)).all())
    if is_mask:
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


# --- modules


def _of_module(subject: Subject) -> str:
    """The first module whose output for a sample depends on others."""

    def look(n: int) -> str:
        indices = chosen_samples(subject.tree, subject.n_samples, n)
        calls = []
        # unequal parts again, and the whole in the same way, with the same numbers
        for size in (n, -(-n * 5 // 8)):
            parts = subject.parts_of(indices)
            with comparable(parts, is_random=subject.is_random):
                calls.append(observed_run(parts, size, names={}))
        whole, split = calls
        rtol = default_rtol(whole)
        if found := first_module(whole, split, rtol):
            name = found[0].name
            return f"{name} mixes the samples of its batch: freeze it with eval(), or replace it."
        if name := mixed_input(whole, split, rtol):
            return (
                f"{_MIXED} {name} gets them, as in mixup. Mix the batch before step(), and pass "
                "what is mixed, labels and factors too, as the batch."
            )
        return ""

    return first_that_fits(look, [min(_N_SAMPLES, subject.n_samples)]) or ""


def _of_transformers(parts: StepParts, subject: Subject) -> str:
    """Models of transformers divide by what they are told, so that sums can be had of them."""
    for name, module in named_modules(parts.roots):
        if not _takes_number(module):
            continue
        # of Mixtral and its like: see
        # test_the_router_loss_of_mixtral_is_refused_although_there_is_a_weight
        if getattr(module.config, "output_router_logits", False):
            return (
                f"{type(module).__name__} adds a router loss over all tokens of its batch, which "
                "no weight makes right: train without output_router_logits, or return the outputs "
                "and compute both losses in loss=."
            )
        labels = next((leaf.path for leaf in subject.tree.leaves if "label" in leaf.path), "")
        if not labels:
            return ""
        # the loss of transformers that shifts labels by one itself; BERT's and T5's do not
        shifts = getattr(module.loss_function, "__name__", "") == "ForCausalLMLoss"
        shown = "(batch{0}[:, 1:] != -100).sum()" if shifts else "(batch{0} != -100).sum()"
        count = shown.format(labels.removeprefix("batch"))
        return (
            f"{type(module).__name__} takes num_items_in_batch: return the pair "
            f"({name}(**batch, num_items_in_batch=1).loss, {count})."
        )
    return ""


def _takes_number(module: nn.Module) -> bool:
    """Whether its forward passes what it is told on to its loss."""
    if not hasattr(module, "config") or not hasattr(type(module), "loss_function"):
        return False
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "loss_function" in code.co_names
