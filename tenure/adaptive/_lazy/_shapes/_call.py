"""A call that runs on tensors without data, to be known: once as it is, once at another batch size.

Invariant: nothing here holds a tensor of the user's, once it is known.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from tenure._storages import storage_key
from tenure._torch.fakes import new_mode, unlogged
from tenure._torch.writes import version_of

from .._labels import MIXED, SHARED, Label, LabelMode, label_of
from .._tape import filled
from ._fakes import fake_of, fake_of_plain, with_fakes
from ._functions import special, trains_statistics, unreduced
from ._meta import Meta, meta_of
from ._shape import Shape
from ._templates import is_plain_value, template_of

_ELSEWHERE = (10007, 10009)
"""Numbers of samples that no other size is a multiple of."""


class Call:
    """A call that is to be known.

    Args:
        func: the function.
        args: its arguments, with `Ref` for tensors that were recorded.
        kwargs: the same by name.
        metas: what those are, by number.
        plains: the other tensors.
        n_samples: how many samples there are.
        has_sizes: whether one of the arguments is a size of the batch.
    """

    def __init__(
        self,
        func: Callable[..., Any],
        args: Any,
        kwargs: Any,
        metas: dict[int, Meta],
        plains: list[Tensor],
        n_samples: int,
        has_sizes: bool,
    ) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self._metas, self._plains, self._n = metas, plains, n_samples
        self._has_sizes = has_sizes
        self._versions: list[int | None] = []
        self._elsewhere = next(n for n in _ELSEWHERE if n != n_samples)

    def shape(self) -> Shape:
        """Run it without data, and see what it gives.

        Raises:
            Exception: it can't be run without data, or not with these arguments.
        """
        given, out = self._run()
        places = {id(tensor): i for i, tensor in enumerate(given)}
        outs: list[Any] = []
        template = template_of(out, places, outs)
        n_lazy = len(self._metas)
        written = {i for i, t in enumerate(given) if version_of(t) != self._versions[i]}
        shapes = [tuple(tensor.shape) for tensor in outs]
        labels, why, cuts, frozen = self._elsewhere_labels(shapes, len(given))
        metas = tuple(meta_of(tensor, label) for tensor, label in zip(outs, labels, strict=False))
        changed = {
            i: meta_of(given[i], labels[len(outs) + i])
            for i in range(n_lazy)
            if i in written or given[i].requires_grad != self._metas_in_order()[i].requires_grad
        }
        kind = _kind(labels, len(outs))
        aliases = tuple(_alias(tensor, given[:n_lazy]) for tensor in outs)
        return Shape(
            template, metas, changed, aliases, cuts, frozen, kind, why,
            is_value=not outs and not written and is_plain_value(template),
            writes_plain=any(i >= n_lazy for i in written)
            or trains_statistics(self.func, self.args, self.kwargs),
        )  # fmt: skip

    def _metas_in_order(self) -> list[Meta]:
        return list(self._metas.values())

    def _run(
        self, n: int | None = None, cuts: dict[int, tuple[int, int]] | None = None,
        label_mode: LabelMode | None = None, frozen: bool = False,
        func: Callable[..., Any] | None = None, **others: Any,
    ) -> tuple[list[Any], Any]:  # fmt: skip
        """Run it without data; the tensors that it was given, and what it gave."""
        mode = new_mode()
        with ExitStack() as block:
            block.enter_context(mode)
            block.enter_context(unlogged())
            # it warns when it runs; at another number of samples, that of targets seems wrong
            block.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            if n is not None:
                block.enter_context(torch.no_grad())
            with torch.inference_mode(False):
                made = {i: fake_of(meta, n) for i, meta in self._metas.items()}
                plain = [
                    fake_of_plain(t, n, (cuts or {}).get(i)) for i, t in enumerate(self._plains)
                ]
            by_id = {id(t): fake for t, fake in zip(self._plains, plain, strict=True)}
            args, kwargs = (
                with_fakes(filled(each, made.__getitem__, None if frozen else n), by_id)
                for each in (self.args, self.kwargs)
            )
            if label_mode is not None:
                block.enter_context(label_mode)
            given = [*made.values(), *plain]
            self._versions = [version_of(t) for t in given]
            return given, (func or self.func)(*args, **(kwargs | others))

    def _elsewhere_labels(
        self, shapes: list[tuple[int, ...]], n_given: int
    ) -> tuple[list[Label], str, dict[int, tuple[int, int]], bool]:
        """The labels of what it gives, and of what it was given, when it has run."""
        nothing: dict[int, tuple[int, int]] = {}
        n_outs = len(shapes)
        mixed = [MIXED] * (n_outs + n_given)
        given = [meta.label for meta in self._metas.values()]
        if not {label.kind for label in given} <= {"shared", "batch"}:
            mixed[n_outs : n_outs + len(given)] = given
            return mixed, "", nothing, False
        why = ""
        for cuts in self._possible_cuts():
            for frozen in (False, True) if self._has_sizes else (False,):
                labels, why_not = self._labels_with(cuts, frozen, shapes)
                if labels is not None and len(labels) == n_outs + n_given:
                    return labels, why_not, cuts, frozen
                why = why or why_not
        mixed[n_outs : n_outs + len(given)] = given
        return mixed, why, nothing, False

    def _labels_with(
        self, cuts: dict[int, tuple[int, int]], frozen: bool, shapes: list[tuple[int, ...]]
    ) -> tuple[list[Label] | None, str]:
        n = self._elsewhere
        mode = LabelMode(n)
        reduction, others = unreduced(self.func, self.args, self.kwargs)
        if reduction == "unknown":
            return None, "how it reduces is not known to be a mean or a sum over samples"
        try:
            given, out = self._run(n, cuts, mode, frozen, func=special(self.func), **others)
        except Exception as error:
            return None, f"it does not run on another number of samples ({_brief(error)})"
        is_number = mode.is_number or (self._has_sizes and self.func is Tensor.new_tensor)
        if is_number and not frozen:
            return None, "it uses the number of samples as a number"
        tensors: list[Any] = []
        template_of(out, {id(t): i for i, t in enumerate(given)}, tensors)
        if len(tensors) != len(shapes):
            return None, "it gives a tensor for each sample"
        labels = [label_of(t) for t in tensors]
        if reduction and labels[0].is_batch:
            labels = [Label(reduction)]
        if any(label == MIXED for label in labels):
            return None, mode.mixing or "it mixes the samples"
        found = zip(labels, tensors, shapes, strict=True)
        if not all(_fits(label, tensor, shape, self._n) for label, tensor, shape in found):
            return None, "it uses the number of samples as a number"
        return [*labels, *map(label_of, given)], ""

    def _possible_cuts(self) -> list[dict[int, tuple[int, int]]]:
        """Which plain tensors may have to be cut: none of them, or each that has such a size."""
        inner: dict[int, tuple[int, int]] = {}
        for i, tensor in enumerate(self._plains):
            for dim, size in enumerate(tensor.shape):
                if size == self._n and i not in inner:
                    inner[i] = (dim, 1)
        ways: list[dict[int, tuple[int, int]]] = [{}, inner] if inner else [{}]
        ways += [{i: cut} for i, cut in inner.items()] if len(inner) > 1 else []
        first = [[(d, 1) for d, s in enumerate(t.shape) if s == self._n] for t in self._plains]
        # second dimensions, as of the state of a recurrent network; rows that were flattened
        later = {i: dims[-1] for i, dims in enumerate(first) if len(dims) > 1}
        if later:
            ways.append(inner | later)
        flat = {
            i: (0, t.shape[0] // self._n)
            for i, t in enumerate(self._plains)
            if t.dim() and t.shape[0] % self._n == 0 and t.shape[0] > self._n > 1 and i not in inner
        }
        ways += [flat, inner | flat] if flat else []
        return ways


def _alias(tensor: Any, given: list[Any]) -> int | None:
    storage = storage_key(tensor)
    for i, each in enumerate(given):
        if storage_key(each) == storage:
            return i
    return None


def _fits(label: Label, elsewhere: Any, shape: tuple[int, ...], n_samples: int) -> bool:
    """Whether a shape is that of another number of samples, save where the label says."""
    expected = list(elsewhere.shape)
    if label.is_batch:
        if label.dim >= len(expected):
            return False
        expected[label.dim] = label.size(n_samples)
    return not (label.is_batch or label == SHARED) or expected == list(shape)


def _kind(labels: list[Label], n_outs: int) -> str:
    kinds = {label.kind for label in labels}
    if kinds <= {"shared", "batch"}:
        return "chunk"
    is_term = n_outs == 1 and labels[0].kind in ("sum", "mean", "counted")
    return (
        "term"
        if is_term and {label.kind for label in labels[1:]} <= {"shared", "batch"}
        else "tail"
    )


def _brief(error: Exception) -> str:
    return str(error).partition("\n")[0][:120]
