"""Computing what was recorded: whole where it fits, else in parts.

Invariant: a value is computed once and kept for who has it; random numbers are drawn, and buffers
written, as often as in the program that was recorded.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tenure._errors import AdaptiveUsageError, BatchCoupledError, OutOfRetriesError
from tenure._torch.writes import version_of
from tenure.scopes import persist

from .._attempt import release
from .._decorators import PLAIN, Piece, run_pieces
from .._oom import OomInfo, oom_of_work
from .._sizes import RememberedCall, RemembersNothing, remembered_of
from .._step import IsolatedGradients, leaves_of
from .._undo import RngState
from ._labels import MIXED, SHARED, Label
from ._shapes import Shape, meta_of, numbers_in, template_of
from ._split_plan import (
    NotSplittableError,
    SplitPlan,
    groups_of,
    plain_tensors,
    plan_of,
    written_groups,
)
from ._split_step import SplitStep
from ._tape import Entry, Modes, Tape, check_unwritten, filled, leaf_of, new_number, replayed, run

_MANY = 1024
_places: dict[int, str] = {}


def value_of(lazy: Any) -> Tensor:
    """The tensor that a recorded one stands for, computed if it was not."""
    tape: Tape = lazy._tape.home()
    number: int = lazy._number
    _compute_for(tape, number, lazy._meta, lazy._is_data)
    if number in tape.values:
        return tape.values[number]
    return tape.leaves[number].value


def _compute_for(tape: Tape, number: int, meta: Any, is_data: bool) -> None:
    pending = tape.pending()
    is_known = number in tape.values or (number in tape.leaves and number not in tape.written)
    # a call that has not run yet may write into it
    if is_known and not any(entry.shape.changed for entry in pending):
        return
    if not pending or (is_data and _run_data(tape, number, pending)):
        return
    if not _fails_whole(tape) or not _is_splittable(tape, number, meta):
        info = _run_whole(tape)
        if info is None:
            return
        _note_split(tape, _root_of(number, meta), info)
    _run_split(tape, number, meta)


def _run_data(tape: Tape, number: int, pending: list[Entry]) -> bool:
    """Run what makes a value of the batch alone, without what else waits; False where it can't."""
    groups = groups_of(tape)
    if any(written_groups(entry, groups) for entry in pending) or tape.is_split:
        return False
    wanted, found = {number}, []
    for entry in reversed(pending):
        if any(n in wanted for n in entry.made):
            found.append(entry)
            wanted.update(entry.reads)
    check_unwritten(found, {n: tape.leaves[n] for n in wanted if n in tape.leaves})
    if tape.rng is None:
        tape.rng = _Start(tape)
    made = [n for entry in found for n in entry.made]
    with persist():
        run(
            replayed(found[::-1], [*made, *tape.values]), tape.values, tape.kind, others=tape.leaves
        )
    for entry in found:
        entry.is_done = True
    tape.tidy()
    return True


def place_of(tape: Tape) -> str:
    """The program, whatever the number of samples: the functions that it calls."""
    functions = tuple([entry.func for entry in tape.entries])
    key = hash(functions)
    if key not in _places:
        if len(_places) >= _MANY:
            _places.clear()
        names = " ".join(getattr(each, "__name__", "") for each in functions)
        _places[key] = hashlib.blake2s(names.encode(), digest_size=8).hexdigest()
    return _places[key]


def _memory_of(tape: Tape) -> RememberedCall | RemembersNothing:
    """What is remembered of running the program whole."""
    return remembered_of(None, sys._getframe(), ("lazy whole", place_of(tape)), None, (), {})


def _fails_whole(tape: Tape) -> bool:
    record = _memory_of(tape).known()
    return record is not None and record.bad is not None and tape.n_samples >= record.bad


def _root_of(number: int, meta: Any) -> int | None:
    """What a split for a value starts from: a loss, for its gradients come with it."""
    is_loss = meta.requires_grad and meta.dtype.is_floating_point and _n_elements(meta) == 1
    return number if is_loss else None


def _is_splittable(tape: Tape, number: int, meta: Any) -> bool:
    try:
        plan_for(tape, _root_of(number, meta))
    except NotSplittableError:
        return False
    return True


def plan_for(tape: Tape, root: int | None) -> SplitPlan:
    """How to split what was recorded.

    Raises:
        NotSplittableError: it has to run whole.
    """
    distributed: Any = torch.distributed
    if (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    ):
        raise NotSplittableError(
            "other processes take part in it, and would wait for one that splits differently"
        )
    plan = plan_of(tape, root)
    if not plan.chunk:
        raise NotSplittableError("nothing in it runs on one sample at a time")
    return plan


def _note_split(tape: Tape, root: int | None, info: OomInfo) -> None:
    """What did not fit whole is split from now on.

    Raises:
        BatchCoupledError: it mixes samples.
        OutOfRetriesError: it can't be split for another reason.
    """
    try:
        plan_for(tape, root)
    except NotSplittableError as error:
        raise _refusal(tape, error) from None
    _memory_of(tape).new().note_failed(tape.n_samples, 1, info.device, None)


# --- whole


class _Start:
    """What running changes besides values, as it was before the first call ran."""

    def __init__(self, tape: Tape) -> None:
        self._rng = RngState(() if tape.kind == "cpu" else _devices(tape))
        self._rng.begin()
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}
        self.note(tape.entries)

    def note(self, entries: list[Entry]) -> None:
        """Note the buffers that some calls will write into."""
        for entry in entries:
            if entry.shape.writes_plain:
                for tensor in plain_tensors((entry.args, entry.kwargs)):
                    if not tensor.requires_grad and id(tensor) not in self._buffers:
                        with torch.no_grad(), persist():
                            self._buffers[id(tensor)] = (tensor, tensor.clone())

    def undo(self) -> None:
        """Bring it back."""
        self._rng.undo()
        with torch.no_grad():
            for tensor, before in self._buffers.values():
                tensor.copy_(before)


def _devices(tape: Tape) -> list[torch.device]:
    return list({leaf.value.device for leaf in tape.leaves.values()})


def _run_whole(tape: Tape) -> OomInfo | None:
    """Run what has not run yet on all samples; what ran out of memory, with all as before."""
    pending = tape.pending()
    check_unwritten(pending, tape.leaves)
    outside = sys.exception()
    if tape.rng is None:
        tape.rng = _Start(tape)
    else:
        tape.rng.note(pending)
    env: dict[int, Any] = tape.values
    for number in tape.written:
        if number not in env:
            with persist():
                env[number] = tape.leaves[number].value.clone()
    what = replayed(pending, [*tape.handles, *env])
    try:
        with persist():
            run(what, env, tape.kind, others=tape.leaves)
    except Exception as error:
        info = oom_of_work(error, outside)
        if info is None or not info.retry_safe:
            start_over(tape)
            raise
        failure = error
    else:
        for entry in pending:
            entry.is_done = True
        tape.tidy()
        _consume_if_done(tape)
        return None
    release(failure, outside)
    del failure
    start_over(tape)
    return info


def start_over(tape: Tape) -> None:
    """As if nothing had run."""
    tape.values.clear()
    for entry in tape.entries:
        entry.is_done = False
    tape.is_split = False
    if tape.rng is not None:
        tape.rng.undo()
        tape.rng = None


def _consume_if_done(tape: Tape) -> None:
    """Without a graph nothing will run again."""
    if not any(meta.requires_grad for entry in tape.entries for meta in entry.shape.metas):
        consume(tape)


def make_whole(lazies: list[Any]) -> None:
    """Compute tensors with their graphs, of the whole batch."""
    for lazy in lazies:
        tape = lazy._tape.home()
        if tape.is_split:
            start_over(tape)
        if tape.pending() and _run_whole(tape) is not None:
            why = "torch.autograd.grad() wants the graph of the whole batch"
            raise _refusal(tape, NotSplittableError(why))


def consume(tape: Tape, root: int | None = None) -> None:
    """What was recorded is used up, or what a root was made of; the rest is data from now on."""
    labels, spent = labels_of(tape), graph_of(tape, root)
    metas = {n: m for e in tape.entries for n, m in zip(e.made, e.shape.metas, strict=True)}
    others = {n for n in tape.handles if n in metas and metas[n].requires_grad} - spent
    kept = _makers(tape, others) if root is not None and others else []
    tape.spent |= {n for n in tape.handles if n in metas and metas[n].requires_grad} - others
    tape.spent |= {n for entry in kept for n in entry.made if n in spent}
    tape.drop_all_but(kept)
    for number in list(tape.values):
        if number not in {n for entry in kept for n in entry.made}:
            value = tape.values.pop(number)
            tape.leaves[number] = leaf_of(value, labels.get(number, SHARED))


def graph_of(tape: Tape, root: int | None) -> set[int]:
    """The values that the gradient of a root flows through; of no root all of them."""
    if root is None:
        return {n for entry in tape.entries for n in entry.made}
    groups = groups_of(tape)
    # views share memory, and a detached one shares no graph: groups tell what was written alone
    wanted, shared = {root}, {groups.get(root, root)}
    found = {root}
    for entry in reversed(tape.entries):
        metas = (*entry.shape.metas, *entry.shape.changed.values())
        gives = wanted.intersection(entry.made) or written_groups(entry, groups) & shared
        if gives and any(meta.requires_grad for meta in metas):
            found.update(entry.made)
            wanted.update(entry.reads)
            shared.update(groups.get(n, n) for n in entry.reads)
    return found | (wanted & tape.spent)


def _makers(tape: Tape, numbers: set[int]) -> list[Entry]:
    """The calls that make some values; all where one writes in place."""
    if any(entry.shape.changed for entry in tape.entries):
        return list(tape.entries)
    wanted, found = set(numbers), []
    for entry in reversed(tape.entries):
        if any(n in wanted for n in entry.made):
            found.append(entry)
            wanted.update(entry.reads)
    return found[::-1]


def run_now(
    func: Any, stored: Any, named: Any, values: dict[int, Tensor], lazies: list[Any], tape: Tape
) -> tuple[Modes, Any, Entry | None]:
    """Run a call on values; what it gives, and an entry that has run where that has tensors."""
    modes = Modes.now(tape.kind)
    if tape.is_split:
        values = {n: _as_recorded(values[n], each) for n, each in _by_number(lazies).items()}
    plain = plain_tensors((stored, named))
    given = [*values.values(), *plain]
    versions = [version_of(tensor) for tensor in given]
    with persist():
        out = func(
            *filled(stored, values.__getitem__, None), **filled(named, values.__getitem__, None)
        )
    places = {id(tensor): i for i, tensor in enumerate(given)}
    tensors: list[Any] = []
    template = template_of(out, places, tensors)
    written = {i for i, tensor in enumerate(given) if version_of(tensor) != versions[i]}
    # what wrote into a tensor that was not recorded has done so
    if not tensors and not any(i < len(values) for i in written):
        return modes, out, None
    metas = tuple(meta_of(tensor, MIXED) for tensor in tensors)
    changed = {i: meta_of(given[i], MIXED) for i in written if i < len(values)}
    aliases: tuple[int | None, ...] = tuple([None] * len(tensors))
    shape = Shape(template, metas, changed, aliases, {}, False, "tail", _DYNAMIC, False)
    numbers = [new_number() for _ in tensors]
    for number, tensor in zip(numbers, tensors, strict=True):
        tape.values[number] = tensor.detach() if tape.is_split else tensor
    entry = Entry(
        new_number(), func, stored, named, modes, tuple(numbers_in(template, numbers)),
        tuple(values), shape, is_done=True,
    )  # fmt: skip
    return modes, template, entry


_DYNAMIC = "what it gives depends on data"


def _by_number(lazies: list[Any]) -> dict[int, Any]:
    return {each._number: each for each in lazies}


def _as_recorded(value: Tensor, lazy: Any) -> Tensor:
    """A value without graph as one that requires grad where the recorded one does."""
    needs = lazy._meta.requires_grad and not value.requires_grad
    return value.detach().requires_grad_() if needs else value


# --- in parts


def labels_of(tape: Tape) -> dict[int, Label]:
    """Where all values have their samples."""
    labels = {number: leaf.label for number, leaf in tape.leaves.items()}
    for entry in tape.entries:
        labels.update(zip(entry.made, (meta.label for meta in entry.shape.metas), strict=True))
    return labels


def _run_split(tape: Tape, number: int, meta: Any) -> None:
    """Compute values in parts: with gradients, that wait, where a loss is wanted."""
    if _root_of(number, meta) is not None:
        gradients, values = _gradients_in_parts(tape, number)
        tape.held = (number, gradients)
    else:
        values = _values_in_parts(tape)
    tape.values.update(values)
    for entry in tape.entries:
        entry.is_done = True
    tape.is_split = True
    tape.tidy()
    _consume_if_done(tape)


def _n_elements(meta: Any) -> int:
    n = 1
    for size in meta.shape:
        n *= size
    return n


def _values_in_parts(tape: Tape) -> dict[int, Tensor]:
    split = _split_step(tape, None)
    if tape.rng is None:
        tape.rng = _Start(tape)
    remembered = remembered_of(None, sys._getframe(), ("lazy values", place_of(tape)), None, (), {})
    piece = Piece(split.piece, 0, (), {})
    run_pieces(
        "lazy", piece, tape.n_samples, initial=max(1, -(-tape.n_samples // 2)),
        options=replace(PLAIN, restore_rng=True), remembered=remembered,
    )  # fmt: skip
    split.finish_values()
    return split.values


def _split_step(tape: Tape, root: int | None) -> SplitStep:
    return SplitStep(tape, root, plan_for(tape, root), labels_of(tape))


def _refusal(tape: Tape, error: NotSplittableError) -> Exception:
    text = (
        f"What was recorded of {tape.n_samples} samples ran out of memory, and can't be split: "
        f"{error}. Nothing was changed. Pass a smaller batch, or say with step() what to do."
    )
    if error.mixing is not None:
        return BatchCoupledError(text, (error.mixing,))
    return OutOfRetriesError(text, (tape.n_samples,))


# --- gradients


def backward(
    roots: list[Any], gradients: list[Any], retain_graph: Any, create_graph: bool, inputs: Any
) -> None:
    """Run what was recorded backward, whole where it fits, else in micro-batches."""
    root = _one_root(roots, gradients)
    tape: Tape = root._tape.home()
    number: int = root._number
    if graph_of(tape, number) & tape.spent:
        raise RuntimeError(_TWICE)
    if inputs is not None:
        inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        inputs = [_real_input(each) for each in inputs]
    keeps = create_graph if retain_graph is None else bool(retain_graph)
    is_known = _fails_whole(tape) and _is_splittable(tape, number, root._meta)
    # gradients that wait are those of a graph that was run backward, and may be used up: see
    # test_gradients_that_wait_are_used_when_there_is_more_memory_by_then
    waits = tape.held is not None and tape.held[0] == number
    if create_graph or not (is_known or waits):
        info = _backward_whole(tape, number, keeps, create_graph, inputs)
        if info is None:
            if not keeps:
                consume(tape, number)
            return
        _note_split(tape, number, info)
    _backward_in_parts(tape, number, inputs)
    if not keeps:
        consume(tape, number)


_TWICE = (
    "Trying to backward through the graph a second time (or directly access saved tensors after "
    "they have already been freed). Specify retain_graph=True if you need to backward through the "
    "graph a second time. A tensor of lazy() was used up by the backward pass before."
)


def _one_root(roots: list[Any], gradients: list[Any]) -> Any:
    """A scalar whose gradients are those that were asked for."""
    total: Any = None
    for root, gradient in zip(roots, gradients, strict=True):
        if not root.requires_grad:
            raise RuntimeError(
                "element 0 of tensors does not require grad and does not have a grad_fn"
            )
        if gradient is None and root.numel() != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        part = root
        if gradient is not None:
            if tuple(gradient.shape) != tuple(root.shape):
                raise RuntimeError(
                    f"Mismatch in shape: grad_output[0] has a shape of {tuple(gradient.shape)} and "
                    f"output[0] has a shape of {tuple(root.shape)}."
                )
            if root.dtype.is_complex:
                raise AdaptiveUsageError("backward() of a complex tensor of lazy() is not there.")
            with torch.enable_grad():
                part = (root * gradient).sum()
        with torch.enable_grad():
            total = part if total is None else total + part
    return total


def _real_input(tensor: Any) -> Tensor:
    if hasattr(tensor, "_tape"):
        found: Tensor = tensor._tape.home().leaves[tensor._number].value
        return found
    return tensor  # type: ignore[no-any-return]


def _backward_whole(
    tape: Tape, number: int, keeps: bool, create_graph: bool, inputs: Any
) -> OomInfo | None:
    """Run it as one; what ran out of memory, with all as before."""
    outside = sys.exception()
    if tape.is_split:
        start_over(tape)
    info = _run_whole(tape) if tape.pending() else None
    if info is not None:
        return info
    isolated = IsolatedGradients(_leaves(tape))
    isolated.begin()
    failure: BaseException | None = None
    try:
        torch.autograd.backward(
            tape.values[number], retain_graph=keeps, create_graph=create_graph, inputs=inputs
        )
    except BaseException as error:
        isolated.undo()
        info = oom_of_work(error, outside)
        if info is None or not info.retry_safe or create_graph:
            raise
        failure = error
    if failure is None:
        isolated.finish()
        return None
    release(failure, outside)
    failure = None
    start_over(tape)
    return info


def _leaves(tape: Tape) -> list[Tensor]:
    """The tensors that may get gradients."""
    plains = [t for e in tape.entries for t in plain_tensors((e.args, e.kwargs))]
    found = [
        t for t in (*plains, *(leaf.value for leaf in tape.leaves.values())) if t.requires_grad
    ]
    return leaves_of(found)


def _backward_in_parts(tape: Tape, number: int, inputs: Any) -> None:
    held, tape.held = tape.held, None
    if held is not None and held[0] == number:
        gradients = held[1]
    else:
        if tape.entries and any(entry.is_done for entry in tape.entries):
            start_over(tape)
        if inputs is None:
            _run_step(tape, number)
            return
        gradients, values = _gradients_in_parts(tape, number)
        _keep(tape, values)
    with torch.no_grad(), persist():
        for leaf, gradient in gradients:
            if inputs is not None and all(leaf is not each for each in inputs):
                continue
            if leaf.grad is None:
                leaf.grad = gradient
            else:
                leaf.grad += gradient


def _run_step(tape: Tape, number: int) -> None:
    _keep(tape, _in_parts(tape, number))


def _in_parts(tape: Tape, number: int) -> dict[int, Tensor]:
    split = _split_step(tape, number)
    if tape.rng is None:
        tape.rng = _Start(tape)
    with torch.enable_grad():
        result = split.run(place_of(tape))
    # there is more memory than there was
    if result.micro_batch == tape.n_samples:
        _memory_of(tape).new().note_ok(tape.n_samples, None, None)
    return split.values


def _keep(tape: Tape, values: dict[int, Tensor]) -> None:
    tape.values.update(values)
    for entry in tape.entries:
        entry.is_done = True
    tape.is_split = True
    tape.tidy()


def _gradients_in_parts(
    tape: Tape, number: int
) -> tuple[list[tuple[Tensor, Tensor]], dict[int, Tensor]]:
    """The gradients of a loss, which nobody sees yet, and the values that somebody has."""
    isolated = IsolatedGradients(_leaves(tape))
    isolated.begin()
    try:
        values = _in_parts(tape, number)
        found = isolated.new()
    finally:
        isolated.undo()
    return found, values


def gradient_of(lazy: Any) -> Any:
    """The gradient of a tensor that was recorded, as far as there is one."""
    tape: Tape = lazy._tape.home()
    leaf = tape.leaves.get(lazy._number)
    value = leaf.value if leaf is not None else tape.values.get(lazy._number)
    return None if value is None else value.grad
