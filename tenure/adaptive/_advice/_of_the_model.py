"""Weights that pass through the device, instead of lying there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from tenure._torch.storages import key_of

from .._predict import Work
from ._change import Change, expression_of
from ._checkpointing import repeated_blocks


def paged_weights(work: Work, has_backward: bool) -> Iterator[Change]:
    """Paging of a model that is not trained, in what two of its largest parts take."""
    # on the host there is nothing to gain, and weights that are trained are not paged
    if has_backward or work.device.type == "cpu" or len(work.roots) != 1:
        return
    (root,) = work.roots.values()
    blocks = {block for _, _, each in repeated_blocks(work) for block in each}
    # one that computes, and one that comes
    budget_bytes = 2 * max((_bytes_of(part) for part in _parts(root, blocks)), default=0)
    weight_bytes = _bytes_of(root)
    if budget_bytes < weight_bytes:
        yield _Paging(
            f"page the weights through {budget_bytes} bytes of {work.device}",
            f'tenure.paging.page({expression_of(work, root)}.cpu(), "{work.device}", '
            f"budget={budget_bytes})",
            saves_bytes=weight_bytes - budget_bytes,
        )


@dataclass(frozen=True, slots=True)
class _Paging(Change):
    """Weights that are there all the time, in whatever moment the peak is."""

    saves_bytes: int = 0

    def peak_bytes(self, work: Work) -> int:
        # not zero-argument super(): slots make another class of this one
        return Change.peak_bytes(self, work) - self.saves_bytes


def _parts(module: nn.Module, blocks: set[nn.Module]) -> Iterator[nn.Module]:
    """What computes with weights of its own, or is repeated; the largest such modules."""
    own = any(
        each is not None for each in (*module._parameters.values(), *module._buffers.values())
    )
    if own or module in blocks:
        yield module
        return
    for child in module.children():
        yield from _parts(child, blocks)


def _bytes_of(module: nn.Module) -> int:
    storages = [each.untyped_storage() for each in (*module.parameters(), *module.buffers())]
    return sum({key_of(each): each.nbytes() for each in storages}.values())
