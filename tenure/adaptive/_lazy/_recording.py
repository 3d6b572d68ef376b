"""How a call of torch becomes an entry of the tape.

Invariant: what the call gives is known as plain PyTorch would tell; what depends on data is
computed first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from tenure._callers import capture_site
from tenure._errors import AdaptiveUsageError, OutOfRetriesError
from tenure._oom import oom_of_work
from tenure._torch.compiler import SCRIPTED
from tenure._torch.lending import lent_to
from tenure._torch.writes import version_of
from tenure.scopes import persist

from ._evaluate import begin, value_of
from ._meta import SHARED, BatchInt, Label, Meta, meta_of, names
from ._shapes import NORMALIZATIONS, Out, Shape, ShapeTrial, outs_in, seen_of
from ._tape import (
    Handle,
    Modes,
    RecordedCall,
    Tape,
    Value,
    call,
    mark_of,
    refuse_own_function,
    replaced,
)

_MANY = 8192
_ELSEWHERE = 10007
"""A number of samples: sizes that are alike here and differ there depend on it in other ways."""
_PAGED = (
    "A tensor of lazy() was given to a paged model. What is recorded runs later, when other "
    "weights lie where these are now. Nothing was computed. Call step(): it runs the forward and "
    "the backward pass of a paged model in micro-batches that fit."
)
_SQUEEZES = frozenset({torch.squeeze, Tensor.squeeze, Tensor.squeeze_})
_PLAIN = frozenset({int, bool, str, type(None), torch.dtype, torch.device, torch.layout,
                    torch.memory_format, type(...), bytes})  # fmt: skip
_WITH_RATES = frozenset(
    names(
        """
        add sub rsub mul div true_divide pow add_ sub_ mul_ div_ __add__ __radd__ __sub__
        __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __iadd__ __isub__
        __imul__ __itruediv__ dropout masked_fill masked_fill_ clamp clip fill_ where lerp
        gt lt ge le eq ne
        """
    )
)

_known: dict[Any, Shape] = {}


def record(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Note a call; what it gives, as tensors to be computed later."""
    if func in _SQUEEZES and len(args) == 1 and not kwargs:
        args = (args[0], _squeezed_dims(args[0]._value.meta))
    walk = Walk(func)
    stored, named = walk.take(args), walk.take(kwargs)
    _check(func, walk)
    tape = _home_of(walk.lazies)
    tape.generators.update({id(each): each for each in walk.generators})
    reads = [each._value for each in walk.lazies]
    entry = RecordedCall(
        func, stored, named, Modes.now(), reads, walk.plains,
        capture_site(sys._getframe(2), "site"), None,
    )  # fmt: skip
    entry.shape = shape = _shape_of(entry, walk, tape)
    # a write into a tensor that was not recorded is seen by who reads it at once
    runs_now = shape is None or (shape.writes_plain and func not in NORMALIZATIONS)
    if shape is not None and not runs_now and shape.is_value:
        return shape.out
    if not (runs_now and shape is not None):
        _cut(entry, {} if shape is None else shape.cuts, tape)
    tensors: list[Tensor] = []
    if runs_now:
        out = _run_now(entry, tensors, tape)
        if entry.shape is None:
            return out
    shape = entry.shape
    entry.marks = [mark_of(tensor) for tensor in entry.tensors]
    made = [Value(meta) for meta in shape.metas]
    for value, alias, tensor in zip_longest(made, shape.aliases, tensors):
        value.base = None if alias is None else reads[alias].root
        value.tensor = tensor
    entry.outs, entry.made = outs_in(shape.out, made), made
    _note_writes(entry, tape)
    tape.entries.append(entry)
    handles = [type(walk.lazies[0])._of(tape, value) for value in made]
    others: list[Any] = [*walk.lazies, *walk.plains]
    if runs_now:
        others = [*walk.lazies, *(v.tensor for v in entry.reads[len(reads) :]), *entry.tensors]
    return replaced(
        shape.out,
        lambda each: (
            each if type(each) is not Out else handles[each] if each >= 0 else others[-1 - each]
        ),
    )


def _check(func: Any, walk: Walk) -> None:
    """Refuse what can't be recorded.

    Raises:
        AdaptiveUsageError: the call is of that kind.
    """
    name = getattr(func, "__name__", func)
    if not walk.lazies:
        raise AdaptiveUsageError(
            f"{name}() got a tensor of lazy() inside of an object that is no list, tuple or dict. "
            "Pass it value()."
        )
    if isinstance(func, SCRIPTED):
        raise AdaptiveUsageError(
            f"{name}() of a model in TorchScript got a tensor of lazy(), which can't be recorded. "
            "Call the model that is not scripted, or use step()."
        )
    if any(lent_to(tensor) is not None for tensor in walk.plains):
        raise AdaptiveUsageError(_PAGED)
    for each in walk.lazies:
        refuse_own_function(each)


def _squeezed_dims(meta: Meta) -> tuple[int, ...]:
    """Return the dimensions of size 1, which another number of samples has too."""
    kept = meta.label.dim if meta.label.is_batch else -1
    return tuple([d for d, n in enumerate(meta.shape) if n == 1 and d != kept])


def _home_of(lazies: list[Handle]) -> Tape:
    first = lazies[0]._tape
    for each in lazies:
        if each._tape is not first:
            first.absorb(each._tape)
    return first


def _shape_of(entry: RecordedCall, walk: Walk, tape: Tape) -> Shape | None:
    key = (entry.func, entry.modes, tape.n_samples, torch.get_default_dtype(), *walk.key)
    shape = _known.get(key) if walk.is_known else None
    if shape is not None:
        return shape
    try:
        shape = ShapeTrial(entry, tape.n_samples, has_sizes=walk.has_sizes).shape()
    except AdaptiveUsageError:
        raise
    except Exception:
        # its shape depends on data, it has no rule, or it is a mistake that torch will tell
        return None
    if walk.is_known:
        if len(_known) > _MANY:
            _known.clear()
        _known[key] = shape
    return shape


def _cut(entry: RecordedCall, cuts: dict[int, Label], tape: Tape) -> None:
    """Record plain tensors that are cut with the batch, or have a graph."""
    plains = entry.tensors
    labels = {i: SHARED for i, t in enumerate(plains) if t.requires_grad and not t.is_leaf} | cuts
    if not labels:
        return
    values = {id(plains[i]): tape.plain_value(plains[i], label) for i, label in labels.items()}

    def cut(each: Any) -> Any:
        return values.get(id(each), each)

    entry.args, entry.kwargs = replaced(entry.args, cut), replaced(entry.kwargs, cut)
    entry.reads = [*entry.reads, *values.values()]
    entry.tensors = [tensor for tensor in plains if id(tensor) not in values]


def _note_writes(entry: RecordedCall, tape: Tape) -> None:
    changed = entry.shape.changed
    if changed:
        tape.held = None
    for i, meta in changed.items():
        value = entry.reads[i]
        tape.check_write(value, getattr(entry.func, "__name__", ""))
        _clone_first(value, tape)
        tape.rewrite(value, meta)


def _clone_first(value: Value, tape: Tape) -> None:
    """Let calls take a clone of a tensor that no call makes: the user's is not written."""
    first = value.root if value.root.mark is not None else value
    if first.mark is None:
        return
    source = Value(first.meta)
    first.base = first.given = None
    for name in ("tensor", "origin", "mark"):
        setattr(source, name, getattr(first, name))
        setattr(first, name, None)
    shape = Shape(Out(0), (first.meta,), {}, (None,), {})
    shape = _known.setdefault((torch.clone, first.meta), shape)
    modes = Modes(grad=True, inference=False, autocast=(), caches=True)
    clone = RecordedCall(
        torch.clone, (source,), {}, modes, [source], [], None, shape, [first], [first],
        number=-1,
    )  # fmt: skip
    tape.entries.insert(0, clone)


def _run_now(entry: RecordedCall, tensors: list[Tensor], tape: Tape) -> Any:
    """Run a call whose shape nobody knows; its shape is in the entry if there are tensors."""
    reads = entry.reads
    handles = {value: tape.handles.get(value) for value in reads}
    values = {v: v.cut() if each is None else value_of(each) for v, each in handles.items()}
    begin(tape, [])
    trains = torch.is_grad_enabled() and any(v.meta.requires_grad for v in reads)
    if tape.is_split:
        values = {v: _as_recorded(tensor, v) for v, tensor in values.items()}
    given = [*values.values(), *entry.tensors]
    versions = [version_of(tensor) for tensor in given]
    if tape.is_split and trains and entry.shape is not None:
        raise AdaptiveUsageError(
            f"{entry.func.__name__}() writes what has a graph into a tensor that lazy() did not "
            "make, and the batch has to be split. Make that tensor of a recorded one, as by "
            "x.new_zeros(...), or use step()."
        )
    outside = sys.exception()
    try:
        with persist():
            out = call(entry, values.__getitem__, None)
    except Exception as error:
        info = oom_of_work(error, outside)
        if info is None:
            raise
        raise OutOfRetriesError(
            f"{entry} ran out of memory on all {tape.n_samples} samples, and "
            "can't be split: lazy() runs it where it is written, as what it gives is only known by "
            "running it (packed sequences are such). Nothing was recorded of it. Pass a smaller "
            "batch, mask what is padded in place of packing it, or use step().",
            (tape.n_samples,), info,
        ) from error  # fmt: skip
    # what it was written of runs backward once more by it
    tape.is_joined |= any(tensor.grad_fn is not None for tensor in entry.tensors)
    template, made, written = seen_of(given, out, versions)
    changed = {i: meta_of(given[i], reads[i].meta.label) for i in written if i < len(reads)}
    # what wrote into a tensor that was not recorded has done so
    if not made and not changed:
        entry.shape = None
        return out
    tensors += [tensor.detach() if tape.is_split else tensor for tensor in made]
    metas = tuple(meta_of(tensor, SHARED) for tensor in made)
    why = "what it gives depends on data"
    entry.shape = Shape(template, metas, changed, (None,) * len(made), {}, why)
    entry.is_done = True
    return out


def _as_recorded(tensor: Tensor, value: Value) -> Tensor:
    """Return a tensor without graph as one that requires grad where the recorded one does."""
    needs = value.meta.requires_grad and not tensor.requires_grad
    return tensor.detach().requires_grad_() if needs else tensor


class Walk:
    """Takes arguments apart: what is stored of them, and what makes two calls alike.

    Args:
        func: the function that is called.

    Attributes:
        key: what is equal for two calls that are alike.
        is_known: whether that can be told; an object of another kind may be anything.
        lazies: the recorded tensors, each once.
        plains: the others, each once.
        generators: the random generators.
        has_sizes: whether a size of the batch is among them.
    """

    def __init__(self, func: Any) -> None:
        # numbers of floating point that are factors make no other call
        self._has_rates = getattr(func, "__name__", "") in _WITH_RATES
        self.key: list[Any] = []
        self.lazies: list[Handle] = []
        self.plains: list[Tensor] = []
        # which tensor is given how early, by its id: f(x, x) is another call than f(x, y)
        self._places: dict[int, int] = {}
        self.has_sizes = False
        self.is_known = True
        self.generators: list[torch.Generator] = []

    def take(self, value: Any) -> Any:
        """Return what is stored of an argument, with a `Value` for each recorded tensor."""
        kind, key = type(value), self.key
        if kind in _PLAIN:
            key.append((kind, value))
        elif kind is float:
            # A factor or a rate, which may change with each call; elsewhere it may be a shape. A
            # rate of 0 or 1 may do nothing, as dropout(p=0), which returns its argument.
            is_rate = self._has_rates and value not in (0.0, 1.0)
            key.append(kind if is_rate else (kind, value))
        elif isinstance(value, Tensor):
            return self._take_tensor(value)
        elif kind is BatchInt:
            self.has_sizes = True
            key.append((kind, int(value), value.at(_ELSEWHERE)))
        elif isinstance(value, tuple | list):
            key.append((kind, len(value)))
            children = [self.take(each) for each in value]
            if kind is torch.Size:
                return tuple(children)
            return kind(*children) if hasattr(value, "_fields") else kind(children)
        elif kind is dict:
            key.append((kind, *value))
            return {name: self.take(each) for name, each in value.items()}
        elif kind is slice:
            key.append(kind)
            return slice(*[self.take(each) for each in (value.start, value.stop, value.step)])
        elif isinstance(value, int | float | complex):
            key.append((kind, value))
        elif isinstance(value, torch.Generator):
            key.append((kind, value.device))
            self.generators.append(value)
        else:
            self.is_known = False
        return value

    def _take_tensor(self, value: Tensor) -> Any:
        is_new = id(value) not in self._places
        place = self._places.setdefault(id(value), len(self._places))
        if isinstance(value, Handle):
            self.key.append((value._value.meta, place))
            if is_new:
                self.lazies.append(value)
            return value._value
        if is_new:
            self.plains.append(value)
        self.key.append((type(value) is Tensor, value.shape, value.stride(), value.dtype,
                         value.device, value.requires_grad, value.is_leaf, place))  # fmt: skip
        return value
