"""Put calls of torch on the tape; their results are known without running them.

Invariant: what the call gives is known as plain PyTorch would tell; what depends on data is
computed first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from tenure._callers import capture_site, without_warnings
from tenure._containers import passed_tensors
from tenure._errors import AdaptiveUsageError, OutOfRetriesError
from tenure._oom import oom_of_work
from tenure._storages import storage_key
from tenure._torch.autograd import hooks_of_saved, is_of_checkpoint, patch_of_checkpoints
from tenure._torch.compiler import SCRIPTED
from tenure._torch.fakes import new_mode, unlogged
from tenure._torch.lending import lent_to
from tenure._torch.writes import version_of
from tenure.scopes import persist

from .._reachable import Reachable
from .._undo import ModuleState, modules_below
from ._meta import SHARED, BatchInt, Label, Meta, meta_of, names
from ._split import value_of
from ._tape import (
    Handle,
    Modes,
    Out,
    RecordedCall,
    Shape,
    Tape,
    Value,
    mark_of,
    outs_in,
    refuse_own_function,
    replaced,
)

_MANY = 8192
_PLAIN = (int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.device,
          torch.layout, torch.memory_format)  # fmt: skip
_ELSEWHERE = 10007
"""A number of samples: sizes that are alike here and differ there depend on it in other ways."""
_PAGED = (
    "A tensor of lazy() was given to a paged model. What is recorded runs later, when other "
    "weights lie where these are now. Nothing was computed. Call step(): it runs the forward and "
    "the backward pass of a paged model in micro-batches that fit."
)
_CHECKPOINTED = (
    "{} writes statistics or other plain tensors inside a checkpoint: torch runs that again in the "
    "backward pass and writes twice, and lazy() would once. Leave the checkpoint out, or use "
    "step()."
)
_SQUEEZES = frozenset({torch.squeeze, Tensor.squeeze, Tensor.squeeze_})
_NORMALIZATIONS = frozenset({F.batch_norm, torch.batch_norm, F.instance_norm})
"""They write into buffers when they run, which torch tells nobody."""
_TRAINING = 5
"""The place of their argument that says so."""
_WITH_RATES = names("""
    add sub rsub mul div true_divide pow add_ sub_ mul_ div_ __add__ __radd__ __sub__ __rsub__
    __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __iadd__ __isub__ __imul__ __itruediv__
    dropout masked_fill masked_fill_ clamp clip fill_ where lerp gt lt ge le eq ne
    """)

_known: dict[Any, Shape] = {}


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


_KEEPING = (_as_it_is, _as_it_is)
"""Hooks of tensors that plain calls in a checkpoint save: what is recorded does not run again."""


def record(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Note a call; what it gives, as tensors to be computed later."""
    if func in _SQUEEZES and not (args[1:] or kwargs) and args[0]._tape.n_samples != 1:
        # the dimensions of size 1, which another number of samples has too
        meta = args[0]._value.meta
        kept = meta.label.dim if meta.label.is_batch else -1
        kwargs = {"dim": tuple([d for d, n in enumerate(meta.shape) if n == 1 and d != kept])}
    walk = _Walk(getattr(func, "__name__", ""))
    stored, named = replaced(args, walk, walk.key), replaced(kwargs, walk, walk.key)
    lazies = walk.lazies
    is_assigned = _is_assigned_back(func, args)
    _check(func, walk, args[0] if is_assigned else None)
    tape = lazies[0]._tape
    for each in lazies:
        if each._tape is not tape:
            tape.absorb(each._tape)
    tape.generators.update({id(each): each for each in walk.generators})
    reads = [each._value for each in lazies]
    site = capture_site(sys._getframe(2), "site")
    entry = RecordedCall(func, stored, named, Modes.now(), reads, walk.plains, site)
    # a write into a tensor that was not recorded is seen by who reads it at once
    shape = _shape_of(entry, walk, tape)
    writes = shape is not None and shape.writes_plain
    hooks = hooks_of_saved()
    if writes and entry.modes.grad and (hooks == _KEEPING or is_of_checkpoint(hooks)):
        raise AdaptiveUsageError(_CHECKPOINTED.format(entry))
    writes_plain = writes and func not in _NORMALIZATIONS
    if not writes_plain:
        _cut(entry, {} if shape is None else shape.cuts, tape)
    tensors: list[Tensor] = []
    others: list[Any] = [*lazies, *walk.plains]
    if shape is None or writes_plain:
        out, tensors = _run_now(entry, tape, writes_plain=writes_plain)
        shape = entry.shape
        others = [*lazies, *(v.tensor for v in entry.reads[len(reads) :]), *entry.tensors]
        # what wrote into a tensor that was not recorded has done so
        if not tensors:
            return out
    elif not shape.metas and shape.out is not None and not outs_in(shape.out):
        # a question that needs no data
        return shape.out
    entry.shape = shape
    _note(entry, tensors, tape)
    handles = [type(lazies[0])._of(tape, v) for v in entry.made[: len(shape.aliases)]]
    if is_assigned:
        # they share memory in the program: who writes into one uses the other no more
        args[0]._value.root = args[2]._value.root
    elif func is Tensor.__getitem__ and shape.aliases[0] == 0:
        handles[0]._taken = reads[0], args[1]
    return replaced(
        shape.out,
        lambda each: (
            each if type(each) is not Out else handles[each] if each >= 0 else others[-1 - each]
        ),
    )


@contextmanager
def _around_checkpoint(function: Any, given: Any) -> Iterator[None]:
    """Return a block for the function of a checkpoint, which writes no buffers if it is recorded.

    Raises:
        AdaptiveUsageError: one was written, such as that of a spectral norm; it is brought back.
    """
    found = Reachable(function)
    # a closure may hold them
    used = [*passed_tensors(given), *found.tensors.values(), *found.constants.values()]
    if not (torch.is_grad_enabled() and any(isinstance(tensor, Handle) for tensor in used)):
        yield
        return
    state = ModuleState(modules_below(found.modules.values()), with_modes=False)
    state.begin()
    try:
        with saved_tensors_hooks(*_KEEPING):
            yield
        for module, name in state.written():
            raise AdaptiveUsageError(_CHECKPOINTED.format(f"{type(module).__name__}.{name}"))
    except AdaptiveUsageError:
        state.undo()
        raise
    state.finish()


watched_checkpoints = patch_of_checkpoints(_around_checkpoint)


def _note(entry: RecordedCall, tensors: list[Tensor], tape: Tape) -> None:
    """Put a call whose results are known on the tape."""
    shape, reads = entry.shape, entry.reads
    entry.marks = [mark_of(tensor) for tensor in entry.tensors]
    for meta, alias, tensor in zip_longest(shape.metas, shape.aliases, tensors):
        value = Value(meta, None if alias is None else reads[alias])
        value.tensor = tensor
        entry.made.append(value)
    for i, value in zip(shape.changed, entry.made[len(shape.aliases) :], strict=True):
        tape.rewrite(reads[i], value)
    tape.entries.append(entry)


class _Walk:
    """Takes arguments apart: gives what is stored of each, and notes what makes two calls alike.

    Attributes:
        key: what is equal for two calls that are alike.
        is_known: whether that can be told; an object of another kind may be anything.
        lazies: the recorded tensors, each once.
        plains: the others, each once.
        generators: the random generators.
    """

    def __init__(self, name: str) -> None:
        # numbers of floating point that are factors make no other call
        self._has_rates = name in _WITH_RATES
        self.key: list[Any] = []
        self.lazies: list[Handle] = []
        self.plains: list[Tensor] = []
        # which tensor is given how early, by its id: f(x, x) is another call than f(x, y)
        self._places: dict[int, int] = {}
        self.is_known = True
        self.generators: list[torch.Generator] = []

    def __call__(self, value: Any) -> Any:
        """Return what is stored of an argument, with a `Value` for each recorded tensor."""
        kind = type(value)
        if isinstance(value, Tensor):
            is_new = id(value) not in self._places
            place = self._places.setdefault(id(value), len(self._places))
            if isinstance(value, Handle):
                if is_new:
                    self.lazies.append(value)
                self.key.append((value._value.meta, place))
                return value._value
            if is_new:
                self.plains.append(value)
            self.key.append((kind is Tensor, value.shape, value.stride(), value.dtype,
                             value.device, value.requires_grad, value.is_leaf, place))  # fmt: skip
        elif kind is float and self._has_rates and value not in (0.0, 1.0):
            # A factor or a rate, which may change with each call; elsewhere it may be a shape. A
            # rate of 0 or 1 may do nothing, as dropout(p=0), which returns its argument.
            self.key.append(kind)
        elif kind is BatchInt:
            self.key.append((kind, int(value), value.at(_ELSEWHERE)))
        elif isinstance(value, torch.Generator):
            self.key.append((kind, value.device))
            self.generators.append(value)
        elif isinstance(value, _PLAIN):
            self.key.append((kind, value))
        else:
            self.is_known = False
        return value


def _is_assigned_back(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether a view is assigned where it is from, as Python does for ``x[0] += 1``."""
    if func is not Tensor.__setitem__ or not all(isinstance(a, Handle) for a in args[::2]):
        return False
    target, view = args[0]._value, args[2]._value
    source, index = args[2]._taken or (None, None)
    is_alone = args[0]._tape.written.get(target.root) == view.root
    return source is target and index is args[1] and is_alone


def _check(func: Any, walk: _Walk, target: Handle | None) -> None:
    """Refuse what can't be recorded.

    Args:
        func: the function.
        walk: its arguments.
        target: gets a view that was written, so that it may be used although that was.

    Raises:
        AdaptiveUsageError: the call is of that kind.
    """
    name = getattr(func, "__name__", None) or getattr(func, "name", func)
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
        if each is not target:
            each._tape.check_current(each._value)


def _cut(entry: RecordedCall, cuts: dict[int, Label], tape: Tape) -> None:
    """Record plain tensors that are cut with the batch, or have a graph."""
    plains = entry.tensors
    labels = {i: SHARED for i, t in enumerate(plains) if t.requires_grad and not t.is_leaf} | cuts
    if not labels:
        return
    values = {id(plains[i]): tape.plain_value(plains[i], label) for i, label in labels.items()}
    entry.args, entry.kwargs = replaced(
        (entry.args, entry.kwargs), lambda each: values.get(id(each), each)
    )
    entry.reads = [*entry.reads, *values.values()]
    entry.tensors = [tensor for tensor in plains if id(tensor) not in values]


# --- what a call gives that was not run


def _shape_of(entry: RecordedCall, walk: _Walk, tape: Tape) -> Shape | None:
    key = (entry.func, entry.modes, tape.n_samples, torch.get_default_dtype(), *walk.key)
    shape = _known.get(key) if walk.is_known else None
    if shape is not None:
        return shape
    try:
        shape = _shape_without_data(entry, tape.n_samples)
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


def _shape_without_data(entry: RecordedCall, n_samples: int) -> Shape:
    """Run a call without data, and see what it gives.

    Raises:
        AdaptiveUsageError: it gives a tensor of lazy() another shape in place.
        Exception: it can't be run without data, or not with these arguments.
    """
    given, versions, out = _run_without_data(entry)
    template, outs, written = _seen_of(given, out, versions)
    old = [value.meta for value in entry.reads]
    if any(fake.shape != meta.shape for fake, meta in zip(given, old, strict=False)):
        raise AdaptiveUsageError(
            f"{entry.name}() would give a tensor of lazy() another shape in place. Call the "
            "function that gives a new tensor."
        )
    trains_statistics = False
    if entry.func in _NORMALIZATIONS:
        by_name = entry.kwargs.get("training", entry.kwargs.get("use_input_stats"))
        trains_statistics = bool(entry.args[_TRAINING] if len(entry.args) > _TRAINING else by_name)
    # statistics are none of samples, also where they are as many
    ways = [{}] if trains_statistics else _possible_cuts(entry, n_samples)
    labels, why, cuts = _scaled(entry, n_samples, ways, [tuple(tensor.shape) for tensor in outs])
    storages = [storage_key(tensor) for tensor in given[: len(old)]]
    changed = tuple(
        i
        for i, meta in enumerate(old)
        if i in written or given[i].requires_grad != meta.requires_grad
    )
    metas = [meta_of(t, label) for t, label in zip(outs, labels, strict=True)]
    metas += [meta_of(given[i], old[i].label) for i in changed]
    return Shape(
        out=template,
        metas=tuple(metas),
        changed=changed,
        aliases=tuple(
            storages.index(key) if key in storages else None for key in map(storage_key, outs)
        ),
        cuts=cuts,
        why=why,
        writes_plain=trains_statistics or any(i >= len(old) for i in written),
    )


def _run_without_data(
    entry: RecordedCall,
    n: int | None = None,
    cuts: dict[int, Label] | None = None,
    *,
    freezes: bool = False,
) -> tuple[list[Any], list[int | None], Any]:
    """Run a call without data; the tensors that it was given, their versions, what it gave."""
    with ExitStack() as block:
        block.enter_context(new_mode())
        block.enter_context(unlogged())
        # it warns when it runs; at another number of samples, that of targets seems wrong
        block.enter_context(without_warnings())
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
        out = entry.call(lazies.__getitem__, None if freezes else n, plains)
        return given, versions, out


def _empty(meta: Meta, n: int | None) -> Any:
    if n is not None:
        return torch.empty(meta.shape_at(n), dtype=meta.dtype, device=meta.device)
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


def _scaled(
    entry: RecordedCall, n_samples: int, ways: list[dict[int, Label]], shapes: list[tuple[int, ...]]
) -> tuple[list[Label], str, dict[int, Label]]:
    """Return how results depend on the number of samples, or why not, and what is cut."""
    best: tuple[list[Label], str, dict[int, Label]] | None = None
    why = ""
    for cuts in ways:
        for freezes in (False, True):
            try:
                given, _, out = _run_without_data(entry, n_samples + 1, cuts, freezes=freezes)
            except Exception as error:
                brief = str(error).partition("\n")[0][:120]
                why = why or f"it does not run on another number of samples ({brief})"
                continue
            ids = set(map(id, given))
            made = [tuple(t.shape) for t in passed_tensors(out) if id(t) not in ids]
            labels = _labels(n_samples, shapes, made)
            if labels is None:
                why = "it mixes the samples"
            elif any(label.is_batch for label in labels):
                return labels, "", cuts
            else:
                best = best or (labels, "", cuts)
    return best or ([SHARED] * len(shapes), why, {})


def _labels(
    n_samples: int, shapes: list[tuple[int, ...]], others: list[tuple[int, ...]]
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
            if label.size(n_samples) != shape[d]:
                return None
        labels.append(label)
    return labels


def _possible_cuts(entry: RecordedCall, n: int) -> list[dict[int, Label]]:
    """Return which plain tensors may be cut: none, or each that has such a size."""
    if entry.name == "lstm":
        # Both states or none: torch reads past the smaller one. Without data, it does not tell that
        # they are of another number of samples.
        states = [
            i
            for i, tensor in enumerate(entry.tensors)
            if tensor.dim() == 3 and tensor.shape[1] == n
        ]
        return [dict.fromkeys(states, Label(1)), {}] if len(states) == 2 else [{}]
    has_samples = any(value.meta.label.is_batch for value in entry.reads)
    plains = {
        i: tensor
        for i, tensor in enumerate(entry.tensors)
        # beside samples alone: a weight may have as many rows by chance
        if has_samples or not (tensor.requires_grad or isinstance(tensor, nn.Parameter))
    }
    dims = {i: [d for d, size in enumerate(t.shape) if size == n] for i, t in plains.items()}
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


def _seen_of(
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


# --- what depends on data


def _run_now(entry: RecordedCall, tape: Tape, *, writes_plain: bool) -> tuple[Any, list[Tensor]]:
    """Run a call whose shape nobody knows, and note it.

    Returns:
        The result, and the tensors that it makes or writes.
    """
    reads = entry.reads
    handles = {value: tape.handles.get(value) for value in reads}
    values = {v: v.cut() if each is None else value_of(each) for v, each in handles.items()}
    tape.begin([])
    if tape.is_split:
        # without graph: as one that requires grad where the recorded one does
        for value, tensor in values.items():
            if value.meta.requires_grad and not tensor.requires_grad:
                values[value] = tensor.detach().requires_grad_()
    trains = torch.is_grad_enabled() and any(v.meta.requires_grad for v in reads)
    if tape.is_split and trains and writes_plain:
        raise AdaptiveUsageError(
            f"{entry.name}() writes what has a graph into a tensor that lazy() did not "
            "make, and the batch has to be split. Make that tensor of a recorded one, as by "
            "x.new_zeros(...), or use step()."
        )
    if entry.name.endswith("_") and entry.name != "__getitem__":
        values = {value: tensor.clone() for value, tensor in values.items()}
    given = [*values.values(), *entry.tensors]
    versions = [version_of(tensor) for tensor in given]
    outside = sys.exception()
    try:
        with persist():
            out = entry.call(values.__getitem__, None)
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
    template, made, written = _seen_of(given, out, versions)
    changed = tuple(i for i in written if i < len(reads))
    tensors = [*made, *(given[i] for i in changed)]
    metas = tuple(meta_of(tensor, SHARED) for tensor in tensors)
    if tape.is_split:
        tensors = [tensor.detach() for tensor in tensors]
    why = "what it gives depends on data"
    entry.shape = Shape(template, metas, changed, (None,) * len(made), {}, why)
    entry.is_done = True
    return out, tensors
