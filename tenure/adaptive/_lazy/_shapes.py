"""What a call gives, known without running it: shapes, types, and where the samples are.

Invariant: nothing here holds a tensor of the user's, once it is known.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tenure._errors import AdaptiveUsageError
from tenure._storages import storage_key
from tenure._torch.fakes import new_mode, unlogged
from tenure._torch.writes import version_of

from ._meta import SHARED, Label, Meta, meta_of
from ._replay import filled, flat_tensors


def _data_label(shape: tuple[int, ...], n_samples: int) -> Label:
    """Return the dimension with the samples of a data tensor: the one of that size."""
    dims = [d for d, size in enumerate(shape) if size == n_samples]
    return Label(dims[0]) if dims else SHARED


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
        kind: ``"tail"``: wants all of the batch; ``"before"``: makes something of the batch alone,
            and runs first, on all of it; ``""``: only running it on samples tells.
        why: what makes it want all of it.
        is_value: whether they give no tensor, and change none.
        writes_plain: whether they write into a tensor that was not recorded.
    """

    out: Any
    metas: tuple[Meta, ...]
    changed: dict[int, Meta]
    aliases: tuple[int | None, ...]
    cuts: dict[int, Label]
    kind: str
    why: str
    is_value: bool = False
    writes_plain: bool = False
    _before: Shape | None = None

    def as_before(self, n_samples: int) -> Shape:
        """Return the same where it is made of the batch alone, and so is data like the batch."""
        if self._before is None:
            metas = tuple(meta.like(_data_label(meta.shape, n_samples)) for meta in self.metas)
            self._before = replace(self, metas=metas, kind="before", why="")
        return self._before


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

    def shape(self) -> Shape:
        """Run it without data, and see what it gives.

        Raises:
            AdaptiveUsageError: it gives a tensor of lazy() another shape in place.
            Exception: it can't be run without data, or not with these arguments.
        """
        given, versions, out = self._run()
        template, outs, written = seen_of(given, out, versions)
        old = self._metas.values()
        if any(fake.shape != meta.shape for fake, meta in zip(given, old, strict=False)):
            raise AdaptiveUsageError(
                f"{getattr(self.func, '__name__', self.func)}() would give a tensor of lazy() "
                "another shape in place. Call the function that gives a new tensor."
            )
        labels, why, cuts = self._scaled([tuple(tensor.shape) for tensor in outs])
        n_lazy = len(self._metas)
        return Shape(
            out=template,
            metas=tuple(meta_of(t, label) for t, label in zip(outs, labels, strict=True)),
            changed={
                i: meta_of(given[i], meta.label)
                for i, meta in enumerate(old)
                if i in written or given[i].requires_grad != meta.requires_grad
            },
            aliases=tuple(_alias(tensor, given[:n_lazy]) for tensor in outs),
            cuts=cuts,
            kind="tail" if why else "",
            why=why,
            is_value=not outs and not written and is_plain_value(template),
            writes_plain=any(i >= n_lazy for i in written) or self._trains_statistics(),
        )

    def _trains_statistics(self) -> bool:
        """Tell whether it is a normalization that writes its buffers."""
        if self.func not in NORMALIZATIONS:
            return False
        by_name = self.kwargs.get("training", self.kwargs.get("use_input_stats"))
        # torch tells nobody that they are written
        return bool(self.args[_TRAINING] if len(self.args) > _TRAINING else by_name)

    def _run(
        self, n: int | None = None, cuts: dict[int, Label] | None = None, *, frozen: bool = False
    ) -> tuple[list[Any], list[int | None], Any]:
        """Run it without data; the tensors that it was given, their versions, what it gave."""
        with ExitStack() as block:
            block.enter_context(new_mode())
            block.enter_context(unlogged())
            # it warns when it runs; at another number of samples, that of targets seems wrong
            block.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            if n is not None:
                block.enter_context(torch.no_grad())
            with torch.inference_mode(False):
                made = {i: _empty(meta, n, meta.label) for i, meta in self._metas.items()}
                plain = [
                    _empty(t, n, (cuts or {}).get(i, SHARED)) for i, t in enumerate(self._plains)
                ]
            by_id = {id(t): fake for t, fake in zip(self._plains, plain, strict=True)}
            args, kwargs = (
                with_tensors(filled(each, made.__getitem__, None if frozen else n), by_id)
                for each in (self.args, self.kwargs)
            )
            given = [*made.values(), *plain]
            return given, [version_of(t) for t in given], self.func(*args, **kwargs)

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


def seen_of(
    given: list[Any], out: Any, versions: list[int | None]
) -> tuple[Any, list[Any], set[int]]:
    """Return what a call gave as a template, its new tensors, and which given ones it wrote."""
    places = {id(tensor): i for i, tensor in enumerate(given)}
    outs: list[Any] = []
    template = template_of(out, places, outs)
    written = {i for i, t in enumerate(given) if version_of(t) != versions[i]}
    return template, outs, written


def _empty(like: Any, n: int | None, label: Label) -> Any:
    shape = list(like.shape)
    # a recorded tensor keeps its own
    stride = tuple(like.stride() if isinstance(like, Tensor) else like.stride)
    if n is not None and label.is_batch:
        shape[label.dim] = label.size(n)
        stride = tuple(_strides(shape, stride))
    with torch.no_grad():
        made = torch.empty_strided(shape, stride, dtype=like.dtype, device=like.device)
    if n is None and like.requires_grad:
        made.requires_grad_()
        if not like.is_leaf:
            with torch.enable_grad():
                made = made.clone()
            if made.stride() != stride:
                made = made.as_strided(shape, stride)
    return made


def _strides(shape: list[int], like: Sequence[int]) -> list[int]:
    """Return dense strides in the order of others."""
    strides, step = [0] * len(shape), 1
    for d in sorted(range(len(shape)), key=lambda d: (like[d], -d)):
        if like[d]:
            strides[d], step = step, step * max(shape[d], 1)
    return strides


def with_tensors(value: Any, by_id: dict[int, Any]) -> Any:
    """Return the arguments with other tensors in place of plain ones."""
    if isinstance(value, Tensor):
        return by_id.get(id(value), value)
    if type(value) in (tuple, list):
        return type(value)([with_tensors(each, by_id) for each in value])
    if type(value) is dict:
        return {key: with_tensors(each, by_id) for key, each in value.items()}
    return value


def template_of(value: Any, places: dict[int, int], outs: list[Any]) -> Any:
    """Return the result, with an `Out` for each tensor."""
    if isinstance(value, Tensor):
        place = places.get(id(value))
        if place is not None:
            return Out(-1 - place)
        outs.append(value)
        return Out(len(outs) - 1)
    if isinstance(value, tuple | list):
        return rebuilt(value, [template_of(each, places, outs) for each in value])
    if isinstance(value, dict):
        return {key: template_of(each, places, outs) for key, each in value.items()}
    return value


def numbers_in(template: Any, numbers: list[int]) -> list[int | None]:
    """Return the numbers of the tensors in what a call gives; None for one that it was given."""
    if isinstance(template, Out):
        return [numbers[template] if template >= 0 else None]
    if isinstance(template, dict):
        template = list(template.values())
    if isinstance(template, tuple | list):
        return [number for each in template for number in numbers_in(each, numbers)]
    return []


class Out(int):
    """The place of a tensor in what a call gives; below zero one that it was given."""


def rebuilt(like: Any, children: list[Any]) -> Any:
    """Return a container like another one."""
    if hasattr(like, "_fields"):
        return type(like)(*children)
    return type(like)(children)


def is_plain_value(value: Any) -> bool:
    """Return whether a call gave something that is no tensor and holds none."""
    if isinstance(value, tuple | list):
        return all(map(is_plain_value, value))
    return not isinstance(value, Out) and value is not None
