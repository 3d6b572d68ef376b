"""What a call gives, known without running it: shapes, types, and where the samples are.

Invariant: nothing here holds a tensor of the user's, once it is known.
"""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tenure._containers import passed_tensors
from tenure._errors import AdaptiveUsageError
from tenure._storages import storage_key
from tenure._torch.fakes import new_mode, unlogged
from tenure._torch.writes import version_of

from ._meta import SHARED, Label, Meta, meta_of
from ._tape import RecordedCall, call, replaced


@dataclass(slots=True, eq=False)
class Shape:
    """What is known of calls that are alike.

    Attributes:
        out: what they give, with an int for each tensor: a place in ``metas``, or below zero for
            one of those that they were given.
        metas: what the tensors are.
        changed: what the tensors that they were given are now, by place among those.
        aliases: for each tensor in ``metas`` the tensor given that it is a view of.
        cuts: which plain tensors are cut with the batch.
        why: what makes it want all of the batch; if nothing, only running it on samples tells.
        is_value: whether they give no tensor, and change none.
        writes_plain: whether they write into a tensor that was not recorded.
    """

    out: Any
    metas: tuple[Meta, ...]
    changed: dict[int, Meta]
    aliases: tuple[int | None, ...]
    cuts: dict[int, Label]
    why: str = ""
    is_value: bool = False
    writes_plain: bool = False


NORMALIZATIONS = frozenset({F.batch_norm, torch.batch_norm, F.instance_norm})
"""They write into buffers, which is seen when they run."""

_TRAINING = 5


class ShapeTrial:
    """A call that is to be known.

    Args:
        entry: the call, whose shape is not known.
        n_samples: how many samples there are.
        has_sizes: whether one of the arguments is a size of the batch.
    """

    def __init__(self, entry: RecordedCall, n_samples: int, *, has_sizes: bool) -> None:
        self._entry, self._n, self._has_sizes = entry, n_samples, has_sizes

    def shape(self) -> Shape:
        """Run it without data, and see what it gives.

        Raises:
            AdaptiveUsageError: it gives a tensor of lazy() another shape in place.
            Exception: it can't be run without data, or not with these arguments.
        """
        given, versions, out = self._run()
        template, outs, written = seen_of(given, out, versions)
        old = [value.meta for value in self._entry.reads]
        n_lazy = len(old)
        if any(fake.shape != meta.shape for fake, meta in zip(given, old, strict=False)):
            raise AdaptiveUsageError(
                f"{getattr(self._entry.func, '__name__', self._entry.func)}() would give a tensor "
                "of lazy() another shape in place. Call the function that gives a new tensor."
            )
        labels, why, cuts = self._scaled([tuple(tensor.shape) for tensor in outs])
        storages = [storage_key(tensor) for tensor in given[:n_lazy]]
        return Shape(
            out=template,
            metas=tuple(meta_of(t, label) for t, label in zip(outs, labels, strict=True)),
            changed={
                i: meta_of(given[i], meta.label)
                for i, meta in enumerate(old)
                if i in written or given[i].requires_grad != meta.requires_grad
            },
            aliases=tuple(
                storages.index(key) if key in storages else None for key in map(storage_key, outs)
            ),
            cuts=cuts,
            why=why,
            is_value=not (outs or written or template is None or outs_in(template, [])),
            writes_plain=any(i >= n_lazy for i in written) or self._trains_statistics(),
        )

    def _trains_statistics(self) -> bool:
        """Tell whether it is a normalization that writes its buffers."""
        entry = self._entry
        if entry.func not in NORMALIZATIONS:
            return False
        by_name = entry.kwargs.get("training", entry.kwargs.get("use_input_stats"))
        # torch tells nobody that they are written
        return bool(entry.args[_TRAINING] if len(entry.args) > _TRAINING else by_name)

    def _run(
        self, n: int | None = None, cuts: dict[int, Label] | None = None, *, frozen: bool = False
    ) -> tuple[list[Any], list[int | None], Any]:
        """Run it without data; the tensors that it was given, their versions, what it gave."""
        entry = self._entry
        with ExitStack() as block:
            block.enter_context(new_mode())
            block.enter_context(unlogged())
            # it warns when it runs; at another number of samples, that of targets seems wrong
            block.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            if n is not None:
                block.enter_context(torch.no_grad())
            with torch.inference_mode(False):
                lazies = {value: _empty(value.meta, n) for value in entry.reads}
                plains = {
                    id(t): _empty(meta_of(t, (cuts or {}).get(i, SHARED)), n)
                    for i, t in enumerate(entry.tensors)
                }
            given = [*lazies.values(), *plains.values()]
            versions = [version_of(tensor) for tensor in given]
            out = call(entry, lazies.__getitem__, None if frozen else n, plains)
            return given, versions, out

    def _scaled(self, shapes: list[tuple[int, ...]]) -> tuple[list[Label], str, dict[int, Label]]:
        """Return how results depend on the number of samples, or why not, and what is cut."""
        best: tuple[list[Label], str, dict[int, Label]] | None = None
        why = ""
        for cuts in self._possible_cuts():
            for frozen in (False, True) if self._has_sizes else (False,):
                try:
                    given, _, out = self._run(self._n + 1, cuts, frozen=frozen)
                except Exception as error:
                    why = why or f"it does not run on another number of samples ({_brief(error)})"
                    continue
                ids = set(map(id, given))
                made = [tuple(t.shape) for t in passed_tensors(out) if id(t) not in ids]
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
        """Return where these shapes have the samples, if one sample more gives the others."""
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
        """Return which plain tensors may be cut: none, or each that has such a size."""
        # statistics are none of samples, also where they are as many
        if self._trains_statistics():
            return [{}]
        n, has_samples = self._n, any(each.meta.label.is_batch for each in self._entry.reads)
        plains = {
            i: tensor
            for i, tensor in enumerate(self._entry.tensors)
            # beside samples alone: a weight may have as many rows by chance
            if has_samples or not (tensor.requires_grad or isinstance(tensor, nn.Parameter))
        }
        dims = {
            i: [d for d, size in enumerate(tensor.shape) if size == n]
            for i, tensor in plains.items()
        }
        first = {i: Label(found[0]) for i, found in dims.items() if found}
        # second dimensions, as of the state of a recurrent network; rows that were flattened
        later = {i: Label(found[-1]) for i, found in dims.items() if len(found) > 1}
        flat = {
            i: Label(0, 1, t.shape[0] // n)
            for i, t in plains.items()
            if t.dim() and t.shape[0] % n == 0 and t.shape[0] > n > 1 and i not in first
        }
        alone = [{i: cut} for i, cut in first.items()] if len(first) > 1 else []
        ways = [first, *alone, first | later, flat, first | flat]
        return [{}, *(way for i, way in enumerate(ways) if way and way not in ways[:i])]


def _brief(error: Exception) -> str:
    return str(error).partition("\n")[0][:120]


def seen_of(
    given: list[Any], out: Any, versions: list[int | None]
) -> tuple[Any, list[Any], set[int]]:
    """Return what a call gave as a template, its new tensors, and which given ones it wrote."""
    places = {id(tensor): Out(-1 - i) for i, tensor in enumerate(given)}
    outs: list[Any] = []

    def place(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in places:
            outs.append(value)
        return places.get(id(value), Out(len(outs) - 1))

    template = replaced(out, place)
    written = {i for i, t in enumerate(given) if version_of(t) != versions[i]}
    return template, outs, written


def _empty(meta: Meta, n: int | None) -> Any:
    if n is not None:
        shape = list(meta.shape)
        if meta.label.is_batch:
            shape[meta.label.dim] = meta.label.size(n)
        return torch.empty(shape, dtype=meta.dtype, device=meta.device)
    with torch.no_grad():
        made = torch.empty_strided(
            meta.shape, meta.stride, dtype=meta.dtype, device=meta.device
        ).requires_grad_(meta.requires_grad)
    if meta.requires_grad and not meta.is_leaf:
        with torch.enable_grad():
            made = made.clone()
        if made.stride() != meta.stride:
            made = made.as_strided(meta.shape, meta.stride)
    return made


class Out(int):
    """The place of a tensor in what a call gives; below zero one that it was given."""


def outs_in(template: Any, values: list[Any]) -> list[Any]:
    """Return what stands for the tensors in what a call gives; None for one that it was given."""
    found: list[Any] = []

    def note(each: Any) -> None:
        if isinstance(each, Out):
            found.append(values[each] if each >= 0 else None)

    replaced(template, note)
    return found
