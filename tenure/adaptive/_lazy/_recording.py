"""How a call of torch becomes an entry of the tape.

Invariant: what the call gives is known as plain PyTorch would tell; what depends on data is
computed first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from tenure._callers import capture_site
from tenure._errors import AdaptiveUsageError, OutOfRetriesError
from tenure._oom import oom_of_work
from tenure._torch.compiler import SCRIPTED
from tenure._torch.lending import lent_to
from tenure._torch.writes import version_of
from tenure.scopes import persist

from ._evaluate import begin, value_of
from ._handle import Handle, refuse_own_function
from ._meta import SHARED, BatchInt, meta_of, names
from ._replay import filled, flat_tensors
from ._shapes import (
    NORMALIZATIONS,
    Call,
    Out,
    Shape,
    numbers_in,
    rebuilt,
    seen_of,
    with_tensors,
)
from ._tape import Modes, RecordedCall, Ref, Tape, mark_of, new_number

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
        args = (args[0], _squeezed_dims(args[0]))
    walk = Walk(func)
    stored, named = walk.take(args), walk.take(kwargs)
    _check(func, walk)
    tape = _home_of(walk.lazies)
    tape.generators.update({id(each): each for each in walk.generators})
    modes = Modes.now(tape.kind)
    shape: Any = _shape_of(func, walk, stored, named, modes, tape)
    # a write into a tensor that was not recorded is seen by who reads it at once
    writes = shape is not None and shape.writes_plain and func not in NORMALIZATIONS
    runs_now = shape is None or writes
    if shape is not None and not writes and shape.is_value:
        return shape.out
    refs = {} if writes else _cut(walk, shape, tape)
    if refs:
        stored, named = with_tensors(stored, refs), with_tensors(named, refs)
    cuts = [ref.number for ref in refs.values()]
    plains = [tensor for tensor in walk.plains if id(tensor) not in refs]
    reads = (*(each._number for each in walk.lazies), *cuts)
    site = capture_site(sys._getframe(2), "site")
    entry = RecordedCall(new_number(), func, stored, named, modes, (), reads, shape, site=site)
    # by the first of each: one that is given twice is one tensor
    given = list({each._number: each for each in walk.lazies}.values())
    tensors: list[Tensor] = []
    if runs_now:
        out = _run_now(entry, given, cuts, plains, tensors, tape)
        if entry.shape is None:
            return out
    is_data = _is_of_data(walk, entry.shape)
    if is_data and not entry.shape.changed and _is_of_all(walk, entry.shape):
        entry.shape = entry.shape.as_before(tape.n_samples)
    entry.plains = tuple([(tensor, mark_of(tensor)) for tensor in plains])
    numbers = [new_number() for _ in entry.shape.metas]
    entry.outs = tuple(numbers_in(entry.shape.out, numbers))
    _note_writes(entry, given, tape)
    tape.entries.append(entry)
    tape.values.update(zip(numbers, tensors, strict=False))
    for number, alias in zip(numbers, entry.shape.aliases, strict=True):
        if alias is not None:
            first = cast("int", given[alias]._number)
            tape.views[number] = tape.views.get(first, first)
    others = [*given, *(tape.leaves[number].value for number in cuts), *plains]
    if not runs_now:
        others = [*given, *walk.plains]
    made = _handles(entry.shape.out, entry.shape, numbers, others, tape)
    each: Any
    for each in flat_tensors(made) if is_data else ():
        each._is_data = True
    return made


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


def _squeezed_dims(tensor: Handle) -> tuple[int, ...]:
    """Return the dimensions of size 1, which another number of samples has too."""
    label = tensor._meta.label
    kept = label.dim if label.is_batch else -1
    return tuple([d for d, n in enumerate(tensor._meta.shape) if n == 1 and d != kept])


def _home_of(lazies: list[Handle]) -> Tape:
    first = lazies[0]._tape.home()
    for each in lazies:
        home = each._tape.home()
        if home is not first:
            first.absorb(home)
        each._tape = first
    return first


def _is_of_data(walk: Walk, shape: Shape) -> bool:
    """Tell whether a call makes something of the batch alone."""
    return (
        all(each._is_data for each in walk.lazies)
        and not any(t.requires_grad or isinstance(t, nn.Parameter) for t in walk.plains)
        and not any(meta.requires_grad for meta in shape.metas)
    )


def _is_of_all(walk: Walk, shape: Shape) -> bool:
    """Tell whether the result of a call on samples has no part for each."""
    reads_samples = any(each._meta.label.is_batch for each in walk.lazies)
    scales = any(meta.label.is_batch for meta in shape.metas)
    return shape.kind == "tail" or (reads_samples and not scales)


def _shape_of(
    func: Any, walk: Walk, stored: Any, named: Any, modes: Modes, tape: Tape
) -> Shape | None:
    key = (func, modes, tape.n_samples, *walk.key)
    shape = _known.get(key) if walk.is_known else None
    if shape is not None:
        return shape
    metas = {each._number: each._meta for each in walk.lazies}
    call = Call(func, stored, named, metas, walk.plains, tape.n_samples, walk.has_sizes)
    try:
        shape = call.shape()
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


def _cut(walk: Walk, shape: Shape | None, tape: Tape) -> dict[int, Ref]:
    """Return leaves in place of plain tensors that are cut with the batch or have a graph."""
    labels = dict.fromkeys(
        [i for i, t in enumerate(walk.plains) if t.requires_grad and not t.is_leaf], SHARED
    )
    labels |= {} if shape is None else shape.cuts
    plains = walk.plains
    return {id(plains[i]): Ref(tape.plain_leaf(plains[i], each)) for i, each in labels.items()}


def _note_writes(entry: RecordedCall, given: list[Handle], tape: Tape) -> None:
    changed = entry.shape.changed
    if not changed:
        return
    tape.held = None
    for i in changed:
        tape.note_write(given[i]._number, getattr(entry.func, "__name__", ""))
    for i, meta in changed.items():
        given[i]._become(meta)


def _handles(template: Any, shape: Shape, numbers: list[int], given: list[Any], tape: Tape) -> Any:
    if isinstance(template, Out):
        if template >= 0:
            return type(given[0])._of(tape, numbers[template], shape.metas[template])
        return given[-1 - template]
    if isinstance(template, tuple | list):
        return rebuilt(template, [_handles(t, shape, numbers, given, tape) for t in template])
    if isinstance(template, dict):
        return {k: _handles(t, shape, numbers, given, tape) for k, t in template.items()}
    return template


def _run_now(
    entry: RecordedCall, lazies: list[Handle], cuts: list[int], plains: list[Tensor],
    tensors: list[Tensor], tape: Tape,
) -> Any:  # fmt: skip
    """Run a call whose shape nobody knows; its shape is in the entry if there are tensors."""
    values = {each._number: value_of(each) for each in lazies}
    begin(tape)
    trains = torch.is_grad_enabled() and any(each._meta.requires_grad for each in lazies)
    if tape.is_split:
        values = {each._number: _as_recorded(values[each._number], each) for each in lazies}
    values |= {n: tape.leaves[n].given() for n in cuts}
    given = [*values.values(), *plains]
    versions = [version_of(tensor) for tensor in given]
    if tape.is_split and trains and entry.shape is not None:
        raise AdaptiveUsageError(
            f"{entry.func.__name__}() writes what has a graph into a tensor that lazy() did not "
            "make, and the batch has to be split. Make that tensor of a recorded one, as by "
            "x.new_zeros(...), or use step()."
        )
    outside = sys.exception()
    get = values.__getitem__
    try:
        with persist():
            out = entry.func(*filled(entry.args, get, None), **filled(entry.kwargs, get, None))
    except Exception as error:
        info = oom_of_work(error, outside)
        if info is None:
            raise
        name = getattr(entry.func, "__name__", str(entry.func))
        raise OutOfRetriesError(
            f"{name}() at {entry.site} ran out of memory on all {tape.n_samples} samples, and "
            "can't be split: lazy() runs it where it is written, as what it gives is only known by "
            "running it (packed sequences are such). Nothing was recorded of it. Pass a smaller "
            "batch, mask what is padded in place of packing it, or use step().",
            (tape.n_samples,), info,
        ) from error  # fmt: skip
    # what it was written of runs backward once more by it
    tape.is_joined |= any(tensor.grad_fn is not None for tensor in plains)
    template, made, written = seen_of(given, out, versions)
    changed = {i: meta_of(given[i], lazies[i]._meta.label) for i in written if i < len(lazies)}
    # what wrote into a tensor that was not recorded has done so
    if not made and not changed:
        entry.shape = None
        return out
    tensors += [tensor.detach() if tape.is_split else tensor for tensor in made]
    metas = tuple(meta_of(tensor, SHARED) for tensor in made)
    why = "what it gives depends on data"
    entry.shape = Shape(template, metas, changed, (None,) * len(made), {}, "tail", why)
    entry.is_done = True
    return out


def _as_recorded(value: Tensor, lazy: Any) -> Tensor:
    """Return a value without graph as one that requires grad where the recorded one does."""
    needs = lazy._meta.requires_grad and not value.requires_grad
    return value.detach().requires_grad_() if needs else value


class Walk:
    """Takes arguments apart: what is stored of them, and what makes two calls alike.

    Args:
        func: the function that is called.

    Attributes:
        key: what is equal for two calls that are alike.
        is_known: whether that can be told; an object of another kind may be anything.
        lazies: the recorded tensors, as often as they are given.
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
        """Return what is stored of an argument, with a `Ref` for each recorded tensor in it."""
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
            return tuple(children) if kind is torch.Size else rebuilt(value, children)
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
        place = self._places.setdefault(id(value), len(self._places))
        if isinstance(value, Handle):
            self.key.append((value._meta, place))
            self.lazies.append(value)
            return Ref(value._number)
        if all(value is not other for other in self.plains):
            self.plains.append(value)
        self.key.append((type(value) is Tensor, value.shape, value.stride(), value.dtype,
                         value.device, value.requires_grad, value.is_leaf, place))  # fmt: skip
        return value
