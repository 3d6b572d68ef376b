"""Declarations that make a loss right: each is tried out on a few samples before it is named."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tenure._text import listed

from ..._undo import named_modules
from .._modules import UPDATE_AFTER
from .._parts import StepParts
from ._compare import DECLARED, GRADIENTS, MOST_SAMPLES, OUTPUTS, differences, first_module, rtol_of
from ._runs import SampledStep, chosen_samples, first_that_fits

# Unequal ones, and an equal one: a mean of means is right for equal parts by accident.
_SPLITS = ((5, 3), (3, 5), (4, 4))
# torch's own, what other libraries take, padding, and the void of segmentation masks.
_IGNORED = (-100, -1, 0, 255)
_EXACT = 1e-6
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
_NO_PAIR = (
    "A pair is (sum, count), and the first value of this one is a mean over samples. Return that "
    "alone, and other values with has_aux=True: (loss, others)."
)
_WEIGHT = (
    "The backward pass is not linear, as with a hook that clamps gradients, and what (sum, count) "
    "divides by is known only after it. Return the mean, and pass the count as weight=."
)
DO_NOT_CLAMP = (
    "The count is a constant, or has a least value, as by clamp(min=1) or max(count, 1), and those "
    "of several micro-batches add up to too much. Return it as it is. If a whole batch may have a "
    "count of 0, count before step(): n = max(count(batch), 1), then "
    'step(lambda batch: total(batch) / n, batch, loss="sum").'
)


def advice_for(step: SampledStep, parts: StepParts) -> str:
    """Return the declarations that may help, as sentences."""
    most = [min(MOST_SAMPLES, step.n_samples)]
    named = _named(step)
    alone = {"apart": True}
    if bool(named) and first_that_fits(lambda n: not _differ(step, n, {"size": n}, alone), most):
        into = listed(named, most=3)
        return f"Each micro-batch reads what the one before has written into {into}. {UPDATE_AFTER}"
    if first_that_fits(lambda n: _differ(step, n, {"scale_of_guess": 1.0}, {}), most):
        return _WEIGHT
    if callable(parts.spec.loss):
        return first_that_fits(lambda n: _of_module(step, parts, n), most) or of_outputs(step)
    if first_that_fits(lambda n: _has_mean_in_pair(step, n), most):
        return _NO_PAIR
    if first_that_fits(lambda n: _is_clamped(step, n), most):
        return DO_NOT_CLAMP
    if declared := declaration_for(step, parts) or _of_router(parts):
        return declared
    module = first_that_fits(lambda n: _of_module(step, parts, n), most) or ""
    return module if "in_dims=1" in module else f"{module} {_OUTPUTS}".lstrip()


def of_outputs(step: SampledStep) -> str:
    """Return the advice for a function that returns outputs, if no module mixes samples."""
    named = _named(step)
    such_as = f", such as {listed(named, most=3)}" if named else ""
    return (
        "What it returns for a sample depends on the other samples of its batch, or loss= reads "
        f"what it keeps elsewhere{such_as}: let it return what each sample gives alone, and do the "
        "rest in loss=, which gets all outputs."
    )


def _has_mean_in_pair(step: SampledStep, n: int) -> bool:
    """Return whether the first value of a pair is nearer to a mean than to a sum over samples."""
    indices, a = chosen_samples(step.tree, step.n_samples, n), -(-n * 5 // 8)
    places = ((0, n), (0, a), (a, n)) if a < n else ()
    runs = [step.observe(indices[i:j], j - i, looks=True, learns=False) for i, j in places]
    for name in runs[0].counts.keys() & runs[0].outcome.terms.keys() if runs else ():
        whole, one, other = (float(r.outcome.terms[str(name)]) * r.counts[name] for r in runs)
        mean = (one * a + other * (n - a)) / n
        if abs(whole - mean) < abs(whole - one - other) / 4:
            return True
    return False


def _is_clamped(step: SampledStep, n: int) -> bool:
    """Return whether counts of samples add up to more than these samples have together."""
    indices = chosen_samples(step.tree, step.n_samples, n)
    each = [step.counts([i]) for i in indices]
    return any(
        sum(one[name] for one in each) > 1.02 * whole
        for name, whole in step.counts(indices).items()
    )


def _named(step: SampledStep) -> list[str]:
    return sorted(step.kept - {""})


def _differ(step: SampledStep, n: int, one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two runs of a few samples differ, as the arguments of `observe` say."""
    indices = chosen_samples(step.tree, step.n_samples, n)
    size: dict[str, Any] = {"size": -(-n * 5 // 8)}
    a, b = (step.observe(indices, **(size | how)) for how in (one, other))
    return bool(differences(step, a, b, rtol_of(GRADIENTS, a.rounded(), step.types)))


def _of_router(parts: StepParts) -> str:
    """Return the advice for a mixture of experts with a router loss of transformers, or ""."""
    for _, module in named_modules(parts.roots):
        if getattr(getattr(module, "config", None), "output_router_logits", False):
            return (
                f"{type(module).__name__} adds a router loss over all tokens of its batch, which "
                "no weight makes right: train without output_router_logits, or return the outputs "
                "of samples, and pass what is computed of all of them as loss=."
            )
    return ""


def _of_module(step: SampledStep, parts: StepParts, n: int) -> str:
    """Return the first module whose output for a sample depends on others, or ""."""
    indices = chosen_samples(step.tree, step.n_samples, n)

    def first() -> str:
        # unequal parts again, and the whole in the same way, with the same numbers
        whole, split = (step.observe(indices, size, watches=True) for size in (n, -(-n * 5 // 8)))
        found = first_module(whole, split, rtol_of(OUTPUTS, whole.rounded()))
        return found[0].name if found else ""

    if not (name := first()):
        return ""
    named = {f"{path} ({type(each).__name__})": each for path, each in named_modules(parts.roots)}
    if getattr(module := named[name], "batch_first", True) is False:
        return (
            f"{name} has batch_first=False, so dimension 0 of its input is time or place, and not "
            "that of the samples: pass in_dims=1, and what it gets for each sample in the batch."
        )
    modes = [(each, each.training) for each in module.modules()]
    try:
        for each, _ in modes:
            # eval() may do more: layers of LoRA merge their weights in it
            each.training = False
        frozen = "freeze it with eval(), or " if first() != name else ""
    finally:
        for each, mode in modes:
            each.training = mode
    return f"{name} mixes the samples of its batch: {frozen}replace it."


def declaration_for(step: SampledStep, parts: StepParts) -> str | None:
    """Return the declaration that makes the samples that were looked at right, if one does."""
    most = [min(MOST_SAMPLES, step.n_samples)]
    return first_that_fits(lambda n: _declared(step, parts, n), most) or None


def _declared(step: SampledStep, parts: StepParts, n: int) -> str:
    indices = chosen_samples(step.tree, step.n_samples, n, spreads=True)
    splits = [(a, b) for a, b in _SPLITS if a + b == n] or [(n - 1, 1), (1, n - 1)]
    values: dict[tuple[int, int], float] = {}
    losses: list[Tensor] = []
    terms: dict[tuple[int, int], dict[str, Tensor]] = {}
    for start, end in [(0, n), *[(0, a) for a, _ in splits], *[(a, n) for a, _ in splits]]:
        run = step.observe(indices[start:end], end - start, learns=False)
        losses.append(run.outcome.loss)
        values[start, end], terms[start, end] = float(losses[-1]), run.outcome.terms
    # of several terms each may need a weight of its own
    if len(terms[0, n]) > 1:
        return _sum_among(terms, n) if step.spec.loss == "mean" else ""
    # parts without a valid label have no mean, and the others may still tell
    splits = [(a, b) for a, b in splits if math.isfinite(values[0, a] + values[a, n])]
    if not splits or not math.isfinite(values[0, n]) or not any(values.values()):
        return ""
    rtol = rtol_of(DECLARED, losses)
    # a masked mean is a sum as well while one part alone has samples that count
    counts_apart = any(values[0, a] and values[a, n] for a, _ in splits)

    def error_of(weights: Tensor | None, inverse: _Curve) -> float:
        """Return how far off the whole is from the sum, or the weighted mean, of its parts."""
        error = math.inf if weights is None and not counts_apart else 0.0
        try:
            for a, _ in splits:
                whole, *each = (inverse(values[run]) for run in ((0, n), (0, a), (a, n)))
                shares = [1.0, 1.0]
                if weights is not None:
                    counts = [float(weights[:a].sum()), float(weights[a:].sum())]
                    shares = [count / sum(counts) for count in counts]
                total = each[0] * shares[0] + each[1] * shares[1]
                error = max(error, abs(whole - total) / (max(abs(whole), abs(total)) or 1.0))
        except (ValueError, OverflowError, ZeroDivisionError):
            return math.inf
        return error

    # as it is declared: if the loss alone agrees, it tells nothing of what would help
    as_it_is = float(step.observe(indices, splits[0][0], learns=False).outcome.loss)
    off = abs(as_it_is - values[0, n]) / (max(abs(as_it_is), abs(values[0, n])) or 1.0)
    tried = [("", off)] if off <= rtol else []
    tried += [
        (told, error)
        for told, weights, inverse in _candidates(step, parts, indices)
        if (error := error_of(weights, inverse)) <= rtol
    ]
    # where little is exact, others are nearly right as well
    least = min([error for _, error in tried], default=0.0)
    return next((told for told, error in tried if error <= max(4 * least, _EXACT)), "")


def _sum_among(terms: Mapping[tuple[int, int], Mapping[str, Tensor]], n: int) -> str:
    """Return the advice for a term that is a sum over samples, beside others that are means."""
    for name, whole in terms[0, n].items():
        parts = [
            float(terms[0, a][name] + terms[a, n][name]) for _, a in terms if (a, n) in terms and a
        ]
        exact = float(whole)
        if exact and all(abs(part - exact) <= 1e-5 * abs(exact) for part in parts):
            return (
                f"The term {name!r} is a sum over samples, and the loss a sum of means: return "
                "this term as a pair (sum, share), where share is the number of samples that the "
                "function got, divided by that of the whole batch."
            )
    return ""


def _candidates(
    step: SampledStep, parts: StepParts, indices: Sequence[int]
) -> Iterator[tuple[str, Tensor | None, _Curve]]:
    """Yield what to declare, the weights of samples (None: a sum), and the inverse of a curve."""
    spec, equal = parts.spec, torch.ones(len(indices))
    if spec.loss != "sum":
        yield 'It is a sum over samples, not a mean: pass loss="sum".', None, float
    if spec.weight is not None or spec.loss == "sum":
        told = "weight=" if spec.weight is not None else 'loss="sum"'
        yield f"It is a mean over samples: leave {told} out.", equal, float
    instead = ', and leave loss="sum" out' if spec.loss == "sum" else ""
    tensors = [
        (leaf.path, leaf.value.detach()[indices].cpu())
        for leaf in step.tree.leaves
        # the code that is shown indexes the first dimension
        if isinstance(leaf.value, Tensor) and leaf.dim == 0
    ]
    for counting in (_counts, _class_weights):
        for shown, counts in counting(tensors, parts):
            yield (
                "It is a mean over something else than samples. Declare what it divides by"
                f"{instead}: weight=lambda batch: {shown} "
                "(with it the samples that were looked at agree).",
                counts.reshape(len(indices), -1).sum(1).double(),
                float,
            )
    for shown, (how, inverse) in _CURVES.items():
        for loss, weights in (("mean", equal), ("sum", None)):
            told = f"It is a function of a {loss}: return that {how}, and pass "
            yield f'{told}loss="{loss}", {shown}.', weights, inverse


_Named = Sequence[tuple[str, Tensor]]


def _counts(tensors: _Named, parts: StepParts) -> Iterator[tuple[str, Tensor]]:
    """Yield what losses often divide by, as code, and its numbers for the samples."""
    # labels before the mask of their inputs, which may count more
    for ignored in (_IGNORED[0], None, *_IGNORED[1:]):
        for name, values in tensors:
            is_mask = bool(((values == 0) | (values == 1)).all())
            if is_mask is not (ignored is None) or (not is_mask and values.is_floating_point()):
                continue
            shown, counts = "{}.sum()", values
            if ignored is not None:
                shown, counts = f"({{}} != {ignored}).sum()", torch.ne(values, ignored)
            if not is_mask and bool(counts.all()):
                continue
            found = [(shown.format(name), counts)]
            if counts.dim() > 1:
                # language models predict the next token, so the first label of a row is not counted
                found.append((shown.format(f"{name}[:, 1:]"), counts[:, 1:]))
            yield from found if is_mask else found[::-1]


def _class_weights(tensors: _Named, parts: StepParts) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of the classes of labels, which ``cross_entropy(weight=w)`` divides by."""
    held = [
        (f"{name}.weight", module._buffers.get("weight"))
        for name, module in named_modules(parts.roots)
    ]
    for name, each in [*parts.outside.items(), *held]:
        if each is None or not each.is_floating_point() or each.dim() != 1:
            continue
        weights = each.detach().cpu().double()
        for path, labels in tensors:
            if labels.dtype is torch.int64:
                valid = (labels >= 0) & (labels < len(weights))
                shown = path
                if not bool(valid.all()):
                    shown = f"{path}[{path} != {int(labels[~valid].flatten()[0])}]"
                yield f"{name}[{shown}].sum()", weights[labels.clamp(0, len(weights) - 1)] * valid
