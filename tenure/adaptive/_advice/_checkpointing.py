"""Blocks whose forward runs again in the backward pass, instead of keeping what it made."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby

from torch import nn
from torch.utils.checkpoint import checkpoint

from .._predict import Work
from ._change import Change, expression_of


def checkpointing(work: Work, has_backward: bool) -> Iterator[Change]:
    """Checkpointing of repeated blocks, the outermost."""
    for container, start, blocks in repeated_blocks(work) if has_backward else ():
        whole = len(blocks) == len(container)
        part = "" if whole else f"[{start}:{start + len(blocks)}]"
        place = expression_of(work, container) + part
        yield Change(
            f"checkpoint the {len(blocks)} {type(blocks[0]).__name__} of {place}",
            f"for block in {place}: block.forward = functools.partial("
            "torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)",
            functools.partial(_checkpointed, blocks),
            is_told_anyway=True,
        )


def repeated_blocks(
    work: Work,
) -> Iterator[tuple[nn.ModuleList | nn.Sequential, int, list[nn.Module]]]:
    """Runs of modules of one class in a container, the outermost: it, the first index, and they."""
    inside: set[nn.Module] = set()
    # modules below come after those above
    for container in work.modules:
        if container in inside or not isinstance(container, nn.ModuleList | nn.Sequential):
            continue
        for start, blocks in _repeated(list(container)):
            inside.update(below for block in blocks for below in block.modules())
            yield container, start, blocks


def _repeated(modules: list[nn.Module]) -> Iterator[tuple[int, list[nn.Module]]]:
    """Runs of two and more of one class that have something to keep."""
    start = 0
    for kind, run in groupby(modules, type):
        blocks = list(run)
        # of a single layer, what is kept is what goes into it
        is_layer = kind.__module__.startswith("torch.nn") and not any(blocks[0].children())
        if len(blocks) > 1 and not is_layer:
            yield start, blocks
        start += len(blocks)


@contextmanager
def _checkpointed(blocks: list[nn.Module]) -> Iterator[None]:
    own = [vars(block).get("forward") for block in blocks]
    try:
        # once each, though a module be there twice
        for block in dict.fromkeys(blocks):
            vars(block)["forward"] = functools.partial(
                checkpoint, block.forward, use_reentrant=False
            )
        yield
    finally:
        for block, forward in zip(blocks, own, strict=True):
            if forward is None:
                vars(block).pop("forward", None)
            else:
                vars(block)["forward"] = forward
