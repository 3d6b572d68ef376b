"""Modules that exchange gradients with other processes as they run backward.

Invariant: a replica that other ranks have, too, exchanges nothing while an attempt runs, for it may
fail on one of them: see `_across`. Of all others the last of the micro-batches of a split step
exchanges, forward and backward, and what was set is set again afterwards, as in a loop with
``no_sync()``. What an attempt that failed has begun to exchange is forgotten, or else the next one
would wait for its end; where torch can't forget, nothing is tried again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from tenure._errors import AdaptiveUsageError
from tenure._torch.replicas import reset_reducer
from tenure._torch.sharding import ShardedGroup, Shards, sharded_groups

from ..._ranks import Replicated, has_other_replicas, is_first_fsdp, is_rank, kept_apart


class GradientExchange:
    """Holds the exchange of gradients back; a part of what an attempt changes.

    Args:
        modules: those of the step that are known before it runs.
        is_local: whether what runs is this rank's own, such as a verification; else other ranks
            wait for what a replica exchanges, so that all have to be known before.

    Attributes:
        shared: the replicas that other ranks have, too.
    """

    __slots__ = (
        "_aside", "_first_fsdp", "_groups", "_held", "_is_broken", "_is_held", "_is_local",
        "_is_ready", "_known", "_replicated", "shared",
    )  # fmt: skip

    def __init__(self, modules: Iterable[nn.Module], *, is_local: bool = False) -> None:
        self._known: set[int] = set()
        self.shared: list[Replicated] = []
        self._replicated: list[Replicated] = []
        self._groups: list[ShardedGroup] = []
        self._first_fsdp: list[nn.Module] = []
        self._is_broken = False
        self._held = ExitStack()
        self._aside: ExitStack | None = None
        self._is_held = False
        self._is_local = is_local
        self._is_ready = False
        self.learn(modules)
        self._is_ready = True

    @property
    def is_sharded(self) -> bool:
        """Whether a module of ``fully_shard`` is known."""
        return bool(self._groups)

    def learn(self, modules: Iterable[nn.Module]) -> None:
        """Count modules in, before they run for the first time."""
        # without processes there is nobody to exchange with, and most programs have none
        if not is_rank():
            return
        for module in modules:
            if id(module) not in self._known:
                self._known.add(id(module))
                self._learn(module)

    def _learn(self, module: nn.Module) -> None:
        groups = sharded_groups(module)
        self._refuse_unexchanged(groups)
        self._groups += groups
        if has_other_replicas(module):
            if self._is_ready and not self._is_local:
                kind = type(module.module).__name__
                raise _not_found(f"a DistributedDataParallel of {kind}", "tell")
            self.shared.append(module)
            if self._aside is not None:
                self._aside.enter_context(kept_apart(module))
        elif self._is_ready and not self._is_local and Shards([module]).n_ranks > 1:
            raise _not_found(f"a sharded module, {type(module).__name__},", "plan with")
        elif isinstance(module, Replicated):
            self._replicated.append(module)
        elif is_first_fsdp(module):
            self._first_fsdp.append(module)
        if self._is_held:
            self._hold([module], groups)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Open a block in which replicas exchange neither gradients nor buffers."""
        before = self._aside
        with ExitStack() as aside:
            for module in self.shared:
                aside.enter_context(kept_apart(module))
            # one that is learned of in the middle is about to run
            self._aside = aside
            try:
                yield
            finally:
                self._aside = before

    def hold_back(self) -> None:
        """Let modules exchange nothing until `resume`.

        Raises:
            AdaptiveUsageError: one of them can't.
        """
        self._is_held = True
        self._hold([*self._replicated, *self._first_fsdp], self._groups)

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
        for module in (*self._replicated, *self.shared):
            if module.gradient_as_bucket_view:
                _take_out_of_buckets(module)

    def finish(self) -> None:
        """Do nothing: it is done already."""

    def undo(self) -> None:
        """Forget what the attempt has begun to exchange."""
        self.resume()
        # not those of other ranks, which have begun nothing: their buckets have to stay alike
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
            elif module in self._first_fsdp:
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


def _not_found(what: str, do: str) -> AdaptiveUsageError:
    return AdaptiveUsageError(
        f"step() runs {what} that it has not found through its function, and would have to {do} "
        "other ranks before anything runs. Nothing was changed. Pass the model as model=."
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
