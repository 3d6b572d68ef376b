"""Modules that exchange gradients with other processes as they run backward.

Invariant: of the micro-batches of a split step the last one exchanges, forward and backward, and
what was set is set again afterwards, as in a loop with ``no_sync()``. What an attempt that failed
has begun to exchange is forgotten, or else the next one would wait for its end; where torch can't
forget, nothing is tried again.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from tenure._errors import AdaptiveUsageError
from tenure._torch.exchange import ShardedGroup, reset_reducer, sharded_groups

_OLD = "FullyShardedDataParallel"
"""The first version of FSDP."""
Replicated = nn.parallel.DistributedDataParallel


def exchanges(module: nn.Module) -> bool:
    """Whether it does, when it runs."""
    # FSDP by name: its second version makes a class for each module that it shards
    return isinstance(module, Replicated) or _is_named(module, "FSDP") or _is_named(module, _OLD)


def _is_named(module: nn.Module, part: str) -> bool:
    return any(part in kind.__name__ for kind in type(module).__mro__)


class GradientExchange:
    """Holds the exchange of gradients back; a part of what an attempt changes.

    Args:
        modules: those of the step that are known before it runs.
    """

    __slots__ = (
        "_groups", "_held", "_is_broken", "_is_held", "_known", "_old", "_replicated",
        "_shared",
    )  # fmt: skip

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._known: set[int] = set()
        self._shared: dict[int, Replicated] = {}
        self._replicated: list[Replicated] = []
        self._groups: list[ShardedGroup] = []
        self._old: list[nn.Module] = []
        self._is_broken = False
        self._held = ExitStack()
        self._is_held = False
        self.learn(modules)

    @property
    def is_sharded(self) -> bool:
        """Whether a module of ``fully_shard`` is known."""
        return bool(self._groups)

    def takes_old(self, parameter: Tensor) -> bool:
        """Whether what was accumulated in a gradient is exchanged by the next backward pass, too.

        Of one rank alone, what was exchanged is what it was.
        """
        module = self._shared.get(id(parameter))
        return module is not None and module.require_backward_grad_sync

    def learn(self, modules: Iterable[nn.Module]) -> None:
        """Count modules in, before they run for the first time."""
        # without processes there is nobody to exchange with, and most programs have none
        distributed: Any = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized()):
            return
        for module in modules:
            if id(module) not in self._known:
                self._known.add(id(module))
                self._learn(module)

    def _learn(self, module: nn.Module) -> None:
        groups = sharded_groups(module)
        self._refuse_unexchanged(groups)
        self._groups += groups
        if isinstance(module, Replicated):
            self._replicated.append(module)
            if torch.distributed.get_world_size(module.process_group) > 1:
                self._shared |= dict.fromkeys(map(id, module.parameters()), module)
        elif _is_named(module, _OLD):
            self._old.append(module)
        if self._is_held:
            self._hold([module], groups)

    def hold_back(self) -> None:
        """Let modules exchange nothing until `resume`.

        Raises:
            AdaptiveUsageError: one of them can't.
        """
        self._is_held = True
        self._hold([*self._replicated, *self._old], self._groups)

    def resume(self) -> None:
        """Let them exchange again, if they did before."""
        self._is_held = False
        self._held.close()

    def begin(self) -> None:
        """Prepare for an attempt.

        Raises:
            AdaptiveUsageError: gradients of before wait for an exchange, in which new ones can't be
                told from them; or an attempt failed that can't be undone.
        """
        if self._is_broken:
            raise AdaptiveUsageError(
                "step() ran out of memory in a module of fully_shard, which torch can't bring back "
                "to what it was. Gradients are as before, but the module is to be made anew. Split "
                "from the beginning: pass maximum=, such as what plan() says for the model without "
                "fully_shard."
            )
        self._refuse_unexchanged(self._groups)
        for module in self._replicated:
            if module.gradient_as_bucket_view:
                _take_out_of_buckets(module)

    def finish(self) -> None:
        """Nothing is left to do."""

    def undo(self) -> None:
        """Forget what the attempt has begun to exchange."""
        self.resume()
        for module in self._replicated:
            reset_reducer(module)
        for group in self._groups:
            group.drop_unexchanged()
        self._is_broken = self.is_sharded

    def _hold(self, modules: Iterable[nn.Module], groups: Iterable[ShardedGroup]) -> None:
        for module in modules:
            if isinstance(module, Replicated):
                _refuse_static(module)
                self._held.enter_context(module.no_sync())
            elif module in self._old:
                raise AdaptiveUsageError(
                    "step() has to split the batch, and got a module of FullyShardedDataParallel, "
                    "which keeps gradients where none of a failed attempt can be told from others. "
                    "Nothing was changed. Shard it by fully_shard, or pass a batch that fits."
                )
        for group in groups:
            self._held.callback(setattr, group, "exchanges", group.exchanges)
            group.exchanges = False, False

    def _refuse_unexchanged(self, groups: list[ShardedGroup]) -> None:
        if any(group.has_unexchanged for group in groups):
            raise AdaptiveUsageError(
                "step() got a module of fully_shard with gradients that a backward pass without "
                "exchange has left, and that no other can be told from. Nothing was changed. Pass "
                "the samples of both passes to one step(), which accumulates by itself."
            )


def _refuse_static(module: Replicated) -> None:
    if module.static_graph:
        raise AdaptiveUsageError(
            "step() has to split the batch, and got a DistributedDataParallel with "
            "static_graph=True, which counts the passes of its first iteration and expects as many "
            "for ever. Nothing was changed. Leave static_graph out, or pass a batch that fits."
        )


def _take_out_of_buckets(module: Replicated) -> None:
    """Copy gradients that stand in the buckets of a module, where new ones are written."""
    for parameter in module.parameters():
        gradient = parameter.grad
        if gradient is not None:
            parameter.grad = gradient.clone()
