"""A change of a piece of work that may lower its peak."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import nn

from .._predict import Work

_MISSING = object()
WITH_INNER = "with_inner"
"""An attribute of a function that runs another one in micro-batches; it returns a function that
runs the other one changed."""


@dataclass(frozen=True, slots=True)
class AdvisedChange:
    """One change.

    Attributes:
        what: it, in words.
        how: a line of Python that makes it.
        made: a block in which it is made; as before after it.
        around: makes the function that runs instead of the work's; None: the same.
        changes_numbers: whether the results are others, beyond the order of sums.
        is_told_anyway: whether to tell it where it does not lower the peak, because people try it.
        paged_bytes: what is on the device in every moment without the change, and not with it.
    """

    what: str
    how: str
    made: Callable[[], AbstractContextManager[Any]] = nullcontext
    around: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    changes_numbers: bool = False
    is_told_anyway: bool = False
    paged_bytes: int = 0

    def peak_bytes(self, work: Work) -> int:
        """Return the peak of the work with it."""
        changed = copy.copy(work)
        if self.around is not None:
            inner = getattr(work.fn, WITH_INNER, None)
            changed.fn = self.around(work.fn) if inner is None else inner(self.around)
        with self.made():
            return changed.observe().record.peak()[0] - self.paged_bytes


@contextmanager
def entries_set(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> Iterator[None]:
    """Open a block in which dicts have some entries; their own are restored afterwards."""
    before = [(space, key, space.get(key, _MISSING)) for space, own in pairs for key in own]
    try:
        for space, own in pairs:
            space.update(own)
        yield
    finally:
        for space, key, value in before:
            if value is _MISSING:
                space.pop(key, None)
            else:
                space[key] = value


def expression_of(work: Work, module: nn.Module) -> str:
    """Return the program's expression for a module, such as ``model.layers[3]``."""
    for root_name, root in work.roots.items():
        for path, each in root.named_modules():
            if each is module:
                name = "model" if root is work.fn else root_name
                parts = path.split(".") if path else []
                return name + "".join(f"[{p}]" if p.isdigit() else f".{p}" for p in parts)
    return "model"


def repeated_blocks(
    work: Work,
) -> Iterator[tuple[nn.ModuleList | nn.Sequential, int, list[nn.Module]]]:
    """Yield outermost runs of modules of one class: the container, the first index, the run."""
    inside: set[nn.Module] = set()
    # modules below come after those above
    for container in work.modules:
        if container in inside or not isinstance(container, nn.ModuleList | nn.Sequential):
            continue
        start = 0
        for kind, run in groupby(list(container), type):
            blocks = list(run)
            # of a single layer, what is kept is what goes into it
            is_layer = kind.__module__.startswith("torch.nn") and not any(blocks[0].children())
            if len(blocks) > 1 and not is_layer:
                inside.update(below for block in blocks for below in block.modules())
                yield container, start, blocks
            start += len(blocks)
