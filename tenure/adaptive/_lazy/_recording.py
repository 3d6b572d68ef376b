"""How a call of torch becomes an entry of the tape.

Invariant: what the call gives is known as plain PyTorch would tell; what depends on data is
computed first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tenure._callers import capture_site
from tenure._errors import AdaptiveUsageError
from tenure._torch.lending import lent_to

from ._evaluate import run_now, value_of
from ._handle import Handle, refuse_own_function
from ._label import SHARED, Label
from ._shapes import NORMALIZATIONS, Call, Out, Shape, numbers_in, rebuilt
from ._tape import Entry, Modes, Ref, Tape, flat_tensors, mark_of, new_number
from ._walk import Walk

_MANY = 8192
_PAGED = (
    "A tensor of lazy() was given to a paged model. What is recorded runs later, when other "
    "weights lie where these are now. Nothing was computed. Call step(): it runs the forward and "
    "the backward pass of a paged model in micro-batches that fit."
)

_known: dict[Any, Shape] = {}


def record(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Note a call; what it gives, as tensors to be computed later."""
    if func in _SQUEEZES and len(args) == 1 and not kwargs:
        args = (args[0], _squeezed_dims(args[0]))
    walk = Walk(func)
    stored, named = walk.take(args), walk.take(kwargs)
    if not walk.lazies:
        raise AdaptiveUsageError(_hidden(func))
    if any(lent_to(tensor) is not None for tensor in walk.plains):
        raise AdaptiveUsageError(_PAGED)
    tape = _home_of(walk.lazies)
    tape.generators.update({id(each): each for each in walk.generators})
    for each in walk.lazies:
        refuse_own_function(each)
    modes = Modes.now(tape.kind)
    shape = _shape_of(func, walk, stored, named, modes, tape)
    # a write into a tensor that was not recorded is seen by who reads it at once
    if shape is None or (shape.writes_plain and func not in NORMALIZATIONS):
        return _run_now(func, args, kwargs, tape, writes=shape is not None)
    if shape.is_value:
        return shape.out
    is_data = _is_of_data(walk, shape)
    if is_data and not shape.changed and _is_of_all(walk, shape):
        shape = shape.as_before(tape.n_samples)
    plains = walk.plains
    if shape.cuts or walk.has_graph:
        walk = _again(walk, shape, tape)
        stored, named = walk.take(args), walk.take(kwargs)
    made = _entered(func, stored, named, walk, modes, shape, tape, plains)
    return _marked(made, is_data)


def _marked(made: Any, is_data: bool) -> Any:
    each: Any
    for each in flat_tensors(made) if is_data else ():
        each._is_data = True
    return made


_SQUEEZES = frozenset({torch.squeeze, Tensor.squeeze, Tensor.squeeze_})


def _squeezed_dims(tensor: Handle) -> tuple[int, ...]:
    """The dimensions of size 1, which another number of samples has too: a single one stays."""
    label = tensor._meta.label
    kept = label.dim if label.is_batch else -1
    return tuple([d for d, n in enumerate(tensor._meta.shape) if n == 1 and d != kept])


def _is_of_data(walk: Walk, shape: Shape) -> bool:
    """Whether a call makes something of the batch alone."""
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
    except Exception:
        # its shape depends on data, it has no rule, or it is a mistake that torch will tell
        return None
    if walk.is_known:
        if len(_known) > _MANY:
            _known.clear()
        _known[key] = shape
    return shape


def _again(walk: Walk, shape: Shape | None, tape: Tape) -> Walk:
    """The same arguments, where plain tensors that are cut or have a graph are leaves."""
    other = Walk()
    cuts: dict[int, Label] = {
        i: SHARED
        for i, tensor in enumerate(walk.plains)
        if tensor.requires_grad and not tensor.is_leaf
    }
    if shape is not None:
        cuts |= shape.cuts
    for i, label in cuts.items():
        other.cuts[id(walk.plains[i])] = Ref(tape.plain_leaf(walk.plains[i], label))
    return other


def _entered(
    func: Any,
    stored: Any,
    named: Any,
    walk: Walk,
    modes: Modes,
    shape: Shape,
    tape: Tape,
    others: list[Tensor],
) -> Any:
    # by the first of each: one that is given twice is one tensor
    given = list({each._number: each for each in walk.lazies}.values())
    numbers = [new_number() for _ in shape.metas]
    reads = (*(each._number for each in walk.lazies), *(r.number for r in walk.cuts.values()))
    outs = tuple(numbers_in(shape.out, numbers))
    plains = tuple([(tensor, mark_of(tensor)) for tensor in walk.plains])
    entry = Entry(new_number(), func, stored, named, modes, outs, reads, shape, plains)
    entry.site = capture_site(sys._getframe(3), "site")
    _note_writes(entry, given, tape)
    tape.entries.append(entry)
    for number, alias in zip(numbers, shape.aliases, strict=True):
        if alias is not None:
            first = given[alias]._number
            tape.views[number] = tape.views.get(first, first)
    return _handles(shape.out, shape, numbers, given, others, tape)


def _note_writes(entry: Entry, given: list[Handle], tape: Tape) -> None:
    changed = entry.shape.changed
    if not changed:
        return
    tape.held = None
    for i in changed:
        tape.note_write(given[i]._number, getattr(entry.func, "__name__", ""))
    for i, meta in changed.items():
        given[i]._become(meta)


def _handles(
    template: Any, shape: Shape, numbers: list[int], given: list[Any], plains: Any, tape: Tape
) -> Any:
    if isinstance(template, Out):
        if template >= 0:
            return type(given[0])._of(tape, numbers[template], shape.metas[template])
        place = -1 - template
        return given[place] if place < len(given) else plains[place - len(given)]
    if isinstance(template, tuple | list):
        return rebuilt(
            template, [_handles(t, shape, numbers, given, plains, tape) for t in template]
        )
    if isinstance(template, dict):
        return {k: _handles(t, shape, numbers, given, plains, tape) for k, t in template.items()}
    return template


def _run_now(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tape: Tape, *, writes: bool
) -> Any:
    """Run a call whose shape nobody knows on what it is given, and record that it ran."""
    walk = Walk()
    stored, named = walk.take(args), walk.take(kwargs)
    if walk.has_graph and not writes:
        walk = _again(walk, None, tape)
        stored, named = walk.take(args), walk.take(kwargs)
    # by the first of each: one that is given twice is one tensor
    given = list({each._number: each for each in walk.lazies}.values())
    for each in given:
        value_of(each)
    cut = [ref.number for ref in walk.cuts.values()]
    modes, template, entry = run_now(func, stored, named, given, cut, tape)
    if entry is None:
        return template
    entry.site, entry.modes = capture_site(sys._getframe(2), "site"), modes
    is_data = _is_of_data(walk, entry.shape) and not (cut or entry.shape.changed)
    if is_data:
        entry.shape = entry.shape.as_before(tape.n_samples)
    _note_writes(entry, given, tape)
    tape.entries.append(entry)
    others = [*(tape.leaves[number].value for number in cut), *walk.plains]
    made = _handles(template, entry.shape, entry.made, given, others, tape)
    return _marked(made, is_data)


def _home_of(lazies: list[Handle]) -> Tape:
    first = lazies[0]._tape.home()
    for each in lazies:
        home = each._tape.home()
        if home is not first:
            first.absorb(home)
        each._tape = first
    return first


def _hidden(func: Any) -> str:
    return (
        f"{getattr(func, '__name__', func)}() got a tensor of lazy() inside of an object that is "
        "no list, tuple or dict. Pass it value()."
    )
