"""What to declare instead: tried out on a few samples, so that what is named does make it right."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn

from .._check import DECLARED, default_rtol, first_module, trial
from .._loss import ONLY
from .._modules import named_modules
from .._samples import Leaf
from .._split import StepSetup, StepSpec
from ._fitting import first_that_fits
from ._samples import chosen_samples
from ._subject import Subject, comparable
from ._values import whole_values

_SPLITS = ((5, 3), (3, 5), (4, 4))
_N_SAMPLES = 8
_IGNORED = (-100, -1, 0, 255)
_CURVES: dict[str, tuple[str, Callable[[float], float]]] = {
    "then=torch.sqrt": ("without the root", lambda value: value**2),
    "then=torch.log": ("without the logarithm", math.exp),
    "then=torch.exp": ("without the exponential", math.log),
}
_OUTPUTS = (
    "Return the outputs, one for each sample, and pass what is computed of all of them as loss=: "
    "step(lambda batch: model(...), batch, loss=lambda outputs: ...). Or return the loss as a pair "
    "(sum, count) or a dict of pairs, one for each term that has another denominator."
)


class Parts(dict[tuple[int, int], float]):
    """The values of a function for runs of samples, by start and end.

    Attributes:
        rtol: how far apart two of them may be that are the same.
    """

    rtol = 0.0

    def agree(self, a: float, b: float, scale: float = 0.0) -> bool:
        """Whether two numbers made of them are the same."""
        return abs(a - b) <= self.rtol * max(abs(a), abs(b), scale)


def advice_for(subject: Subject, setup: StepSetup, spec: StepSpec, *, is_random: bool) -> str:
    """What the user can declare, as sentences."""
    if callable(spec.loss):
        return _of_module(subject, is_random) or (
            "What it returns for a sample depends on the other samples of its batch: let it return "
            "what each sample gives alone, and do the rest in loss=, which gets all outputs."
        )
    declared = first_that_fits(lambda _: _declared(subject, spec, is_random), (1,))
    numbered = _of_transformers(setup, subject)
    if declared:
        return f"{declared} {numbered}".rstrip()
    return f"{_of_module(subject, is_random)} {numbered or _OUTPUTS}".lstrip()


def _declared(subject: Subject, spec: StepSpec, is_random: bool) -> str:
    """The declaration that makes the samples that were looked at right; "" for none."""
    n = min(_N_SAMPLES, subject.n_samples)
    indices = chosen_samples(subject.tree, subject.n_samples, n)
    splits = [(a, b) for a, b in _SPLITS if a + b == n] or [(n - 1, 1), (1, n - 1)]
    starts = [(0, n), *((0, a) for a, _ in splits), *((a, n) for a, _ in splits)]
    parts, values = Parts(), []
    for start, end in starts:
        value = _value(subject, indices[start:end], is_random)
        parts[start, end] = float(value)
        values.append(value)
    parts.rtol = DECLARED.of(values)
    if any(not math.isfinite(value) for value in parts.values()):
        splits = [(a, b) for a, b in splits if math.isfinite(parts[0, a] + parts[a, n])]
        if not splits or not math.isfinite(parts[0, n]):
            return ""
    return next(_candidates(subject, spec, indices, parts, splits), "")


def _candidates(
    subject: Subject,
    spec: StepSpec,
    indices: list[int],
    parts: Parts,
    splits: Sequence[tuple[int, int]],
) -> Iterator[str]:
    whole = parts[0, len(indices)]

    def holds(weight: Callable[[int, int], float], of: Callable[[float], float] = float) -> bool:
        try:
            return all(_is_mean(parts, a, a + b, weight, of) for a, b in splits)
        except (ValueError, OverflowError, ZeroDivisionError):
            return False

    if spec.loss != "sum" and _are_sums(parts, splits):
        yield 'It is a sum over samples, and a mean was declared: pass loss="sum".'
    is_declared = spec.weight is not None or spec.loss == "sum"
    if is_declared and holds(lambda start, end: end - start):
        told = "weight=" if spec.weight is not None else 'loss="sum"'
        yield f"It is a mean over samples: leave {told} out."
    rests = [whole - parts[0, a] - parts[a, a + b] for a, b in splits]
    if (
        spec.loss == "sum"
        and len(rests) > 1
        and parts.agree(min(rests), max(rests), max(map(abs, rests)))
    ):
        yield (
            f"It has a part of {-rests[0]:.6g} that is there once for each micro-batch, such as a "
            "penalty on parameters: return the rest, and pass that part as once=lambda: penalty()."
        )
    for shown, counted in _weights(subject, indices):
        if holds(counted):
            yield (
                "It is a mean over something else than samples. Declare what it divides by: "
                f"weight=lambda batch: {shown} (with it the samples that were looked at agree)."
            )
    for shown, (how, inverse) in _CURVES.items():
        for loss, weight in (("mean", lambda s, e: e - s), ("sum", None)):
            if weight is None:
                right = (
                    all(
                        parts.agree(inverse(whole), inverse(parts[0, a]) + inverse(parts[a, a + b]))
                        for a, b in splits
                    )
                    if _is_safe(inverse, parts)
                    else False
                )
            else:
                right = holds(weight, inverse)
            if right:
                yield (
                    f"It is a function of a {loss}: return that {how}, and pass "
                    f'loss="{loss}", {shown}.'
                )


def _is_safe(inverse: Callable[[float], float], parts: Parts) -> bool:
    try:
        return all(math.isfinite(inverse(value)) for value in parts.values())
    except (ValueError, OverflowError):
        return False


def _are_sums(parts: Parts, splits: Sequence[tuple[int, int]]) -> bool:
    return all(parts.agree(parts[0, a + b], parts[0, a] + parts[a, a + b]) for a, b in splits)


def _is_mean(
    parts: Parts,
    middle: int,
    end: int,
    weight: Callable[[int, int], float],
    of: Callable[[float], float],
) -> bool:
    first, second = weight(0, middle), weight(middle, end)
    total = of(parts[0, middle]) * first + of(parts[middle, end]) * second
    return parts.agree(of(parts[0, end]), total / (first + second))


def _value(subject: Subject, indices: list[int], is_random: bool) -> Tensor:
    setup = subject.of(subject.taken(indices))
    with comparable(setup, is_random=is_random):
        values = whole_values(setup)
    if len(values) > 1:
        raise ValueError("several terms")  # each may need a weight of its own
    return values[ONLY]


def _weights(
    subject: Subject, indices: list[int]
) -> Iterator[tuple[str, Callable[[int, int], float]]]:
    """Numbers that losses often divide by, as code, and what they are for runs of the samples."""
    for leaf in subject.tree.leaves:
        if not isinstance(leaf.value, Tensor) or leaf.dim != 0:
            continue
        values = leaf.value.detach()[indices].cpu()
        for shown, counts in _counts(leaf, values):
            counted = counts.reshape(len(indices), -1).sum(1).double()
            yield shown, functools.partial(_sum_of_run, counted)


def _sum_of_run(counted: Tensor, start: int, end: int) -> float:
    return float(counted[start:end].sum())


def _counts(leaf: Leaf, values: Tensor) -> Iterator[tuple[str, Tensor]]:
    name = leaf.path
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


def _of_module(subject: Subject, is_random: bool) -> str:
    """The first module whose output for a sample depends on others."""

    def look(n: int) -> str:
        indices = chosen_samples(subject.tree, subject.n_samples, n)
        calls = []
        for size in (n, -(-n * 5 // 8)):
            setup = subject.of(subject.taken(indices))
            with comparable(setup, is_random=is_random):
                calls.append(trial(setup, size))
        whole, split = calls
        found = first_module(whole, split, default_rtol(whole))
        if not found:
            return ""
        return (
            f"{found[0].name} mixes the samples of its batch: freeze it with eval(), or replace it."
        )

    return first_that_fits(look, [min(_N_SAMPLES, subject.n_samples)]) or ""


def _of_transformers(setup: StepSetup, subject: Subject) -> str:
    """Models of transformers divide by what they are told, so that sums can be had of them."""
    for name, module in named_modules(setup.roots):
        if not _takes_number(module):
            continue
        if getattr(module.config, "output_router_logits", False):
            return (
                f"{type(module).__name__} adds a router loss over all tokens of its batch, which "
                "no weight makes right: train without output_router_logits, or return the outputs "
                "and compute both losses in loss=."
            )
        labels = next((leaf.path for leaf in subject.tree.leaves if "label" in leaf.path), "")
        if not labels:
            return ""
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
