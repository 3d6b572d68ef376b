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
from torch.nn import functional as F

from tenure._storages import storage_key
from tenure._torch.fakes import new_mode, unlogged
from tenure._torch.writes import version_of

from .._label import SHARED, Label
from .._tape import filled, flat_tensors
from ._fakes import fake_of, fake_of_plain, with_tensors
from ._meta import Meta, meta_of
from ._shape import Shape
from ._templates import is_plain_value, template_of

NORMALIZATIONS = frozenset({F.batch_norm, torch.batch_norm, F.instance_norm})
"""They write into buffers, which is seen when they run."""

_TRAINING = 5


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
        labels, why, cuts = self._scaled([tuple(tensor.shape) for tensor in outs])
        metas = tuple(meta_of(tensor, label) for tensor, label in zip(outs, labels, strict=True))
        changed = {
            i: meta_of(given[i], meta.label)
            for i, meta in enumerate(self._metas.values())
            if i in written or given[i].requires_grad != meta.requires_grad
        }
        metas_given = self._metas.values()
        is_resized = any(
            fake.shape != meta.shape for fake, meta in zip(given, metas_given, strict=False)
        )
        if is_resized:
            why = "it gives a tensor another shape"
        aliases = tuple(_alias(tensor, given[:n_lazy]) for tensor in outs)
        return Shape(
            template, metas, changed, aliases, cuts, "tail" if why else "", why,
            is_value=not outs and not written and is_plain_value(template),
            is_hook=is_resized,
            writes_plain=any(i >= n_lazy for i in written) or self._trains_statistics(),
        )  # fmt: skip

    def _trains_statistics(self) -> bool:
        """Tell whether it is a normalization that writes its buffers."""
        if self.func not in NORMALIZATIONS:
            return False
        by_name = self.kwargs.get("training", self.kwargs.get("use_input_stats"))
        # torch tells nobody that they are written
        return bool(self.args[_TRAINING] if len(self.args) > _TRAINING else by_name)

    def _run(
        self, n: int | None = None, cuts: dict[int, Label] | None = None, *, frozen: bool = False
    ) -> tuple[list[Any], Any]:
        """Run it without data; the tensors that it was given, and what it gave."""
        with ExitStack() as block:
            block.enter_context(new_mode())
            block.enter_context(unlogged())
            # it warns when it runs; at another number of samples, that of targets seems wrong
            block.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            if n is not None:
                block.enter_context(torch.no_grad())
            with torch.inference_mode(False):
                made = {i: fake_of(meta, n) for i, meta in self._metas.items()}
                plain = [
                    fake_of_plain(t, n, (cuts or {}).get(i, SHARED))
                    for i, t in enumerate(self._plains)
                ]
            by_id = {id(t): fake for t, fake in zip(self._plains, plain, strict=True)}
            args, kwargs = (
                with_tensors(filled(each, made.__getitem__, None if frozen else n), by_id)
                for each in (self.args, self.kwargs)
            )
            given = [*made.values(), *plain]
            self._versions = [version_of(t) for t in given]
            return given, self.func(*args, **kwargs)

    def _scaled(self, shapes: list[tuple[int, ...]]) -> tuple[list[Label], str, dict[int, Label]]:
        """How what it gives depends on the number of samples, why it does not, and what is cut."""
        best: tuple[list[Label], str, dict[int, Label]] | None = None
        why = ""
        for cuts in self._possible_cuts():
            for frozen in (False, True) if self._has_sizes else (False,):
                try:
                    given, out = self._run(self._n + 1, cuts, frozen=frozen)
                except Exception as error:
                    why = why or f"it does not run on another number of samples ({_brief(error)})"
                    continue
                ids = set(map(id, given))
                made = [tuple(t.shape) for t in flat_tensors(out) if id(t) not in ids]
                labels = self._labels(shapes, made)
                if labels is None:
                    why = "it mixes the samples"
                elif any(label.is_batch for label in labels):
                    return labels, "", cuts
                else:
                    best = best or (labels, "", cuts)
        return best or ([SHARED] * len(shapes), why, {})

    def _labels(
        self, shapes: list[tuple[int, ...]], others: list[tuple[int, ...]]
    ) -> list[Label] | None:
        """Where tensors of these shapes have the samples, if one more gives the others."""
        if len(shapes) != len(others):
            return None
        labels = []
        for shape, other in zip(shapes, others, strict=True):
            grown = [d for d, size in enumerate(other[: len(shape)]) if size != shape[d]]
            if len(shape) != len(other) or len(grown) > 1:
                return None
            label = SHARED
            for d in grown:
                label = Label(d, 1, other[d] - shape[d])
                if label.size(self._n) != shape[d]:
                    return None
            labels.append(label)
        return labels

    def _possible_cuts(self) -> list[dict[int, Label]]:
        """Which plain tensors may have to be cut: none of them, or each that has such a size."""
        # statistics are none of samples, also where they are as many
        if self._trains_statistics():
            return [{}]
        n = self._n
        dims = {
            i: [d for d, size in enumerate(tensor.shape) if size == n]
            for i, tensor in enumerate(self._plains)
        }
        first = {i: Label(found[0]) for i, found in dims.items() if found}
        # second dimensions, as of the state of a recurrent network; rows that were flattened
        later = {i: Label(found[-1]) for i, found in dims.items() if len(found) > 1}
        flat = {
            i: Label(0, 1, t.shape[0] // n)
            for i, t in enumerate(self._plains)
            if t.dim() and t.shape[0] % n == 0 and t.shape[0] > n > 1 and i not in first
        }
        alone = [{i: cut} for i, cut in first.items()] if len(first) > 1 else []
        ways = [first, *alone, first | later, flat, first | flat]
        return [{}, *(way for i, way in enumerate(ways) if way and way not in ways[:i])]


def _alias(tensor: Any, given: list[Any]) -> int | None:
    storage = storage_key(tensor)
    for i, each in enumerate(given):
        if storage_key(each) == storage:
            return i
    return None


def _brief(error: Exception) -> str:
    return str(error).partition("\n")[0][:120]
