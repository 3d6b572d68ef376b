"""Calls whose shapes depend on data: they run when they are written."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tenure._callers import capture_site
from tenure._errors import OutOfRetriesError
from tenure._oom import oom_of_work
from tenure._torch.writes import version_of
from tenure.scopes import persist

from .._label import SHARED
from .._shapes import Shape, meta_of, numbers_in, template_of
from .._tape import Entry, Leaf, Modes, Tape, filled, new_number, plain_tensors, refuse_silence
from ._whole import begin


def run_now(
    func: Any, stored: Any, named: Any, lazies: list[Any], cut: list[int], tape: Tape
) -> tuple[Modes, Any, Entry | None]:
    """Run a call on values; what it gives, and an entry that has run where that has tensors.

    Args:
        func: what is called.
        stored: its arguments, with `Ref` for what was recorded.
        named: the same by name.
        lazies: the recorded ones, each once; their values are known.
        cut: the numbers of those that were not recorded and are leaves.
        tape: what they belong to.
    """
    modes = Modes.now(tape.kind)
    begin(tape)
    leaves = tape.given()
    values = {n: _known(tape, leaves, n) for n in (*(each._number for each in lazies), *cut)}
    if tape.is_split:
        values |= {each._number: _as_recorded(values[each._number], each) for each in lazies}
    plain = plain_tensors((stored, named))
    given = [*values.values(), *plain]
    versions = [version_of(tensor) for tensor in given]
    outside = sys.exception()
    try:
        with persist():
            out = func(
                *filled(stored, values.__getitem__, None), **filled(named, values.__getitem__, None)
            )
    except Exception as error:
        info = oom_of_work(error, outside)
        if info is None:
            refuse_silence(func, error)
            raise
        raise OutOfRetriesError(_too_large(func, tape), (tape.n_samples,), info) from error
    places = {id(tensor): i for i, tensor in enumerate(given)}
    tensors: list[Any] = []
    template = template_of(out, places, tensors)
    written = {i for i, tensor in enumerate(given) if version_of(tensor) != versions[i]}
    # what wrote into a tensor that was not recorded has done so
    if not tensors and not any(i < len(lazies) for i in written):
        return modes, out, None
    metas = tuple(meta_of(tensor, SHARED) for tensor in tensors)
    changed = {i: meta_of(given[i], lazies[i]._meta.label) for i in written if i < len(lazies)}
    aliases: tuple[int | None, ...] = tuple([None] * len(tensors))
    shape = Shape(
        template, metas, changed, aliases, {},
        "tail", _DYNAMIC, is_value=False,
    )  # fmt: skip
    numbers = [new_number() for _ in tensors]
    for number, tensor in zip(numbers, tensors, strict=True):
        tape.values[number] = tensor.detach() if tape.is_split else tensor
    entry = Entry(
        new_number(), func, stored, named, modes, tuple(numbers_in(template, numbers)),
        tuple(values), shape, is_done=True,
    )  # fmt: skip
    return modes, template, entry


def _too_large(func: Any, tape: Tape) -> str:
    name, site = getattr(func, "__name__", str(func)), capture_site(sys._getframe(2), "site")
    return (
        f"{name}() at {site} ran out of memory on all {tape.n_samples} samples, and can't be "
        "split: lazy() runs it where it is written, as what it gives is only known by running it "
        "(packed sequences are such). Nothing was recorded of it. Pass a smaller batch, mask what "
        "is padded in place of packing it, or use step()."
    )


_DYNAMIC = "what it gives depends on data"


def _known(tape: Tape, leaves: Mapping[int, Leaf], number: int) -> Tensor:
    return tape.values[number] if number in tape.values else leaves[number].value


def _as_recorded(value: Tensor, lazy: Any) -> Tensor:
    """A value without graph as one that requires grad where the recorded one does."""
    needs = lazy._meta.requires_grad and not value.requires_grad
    return value.detach().requires_grad_() if needs else value
