"""Modules that a step can't just run in parts: they mix samples, exchange gradients, are written.

Modules that mix the samples of a batch are known in two ways: by type, before anything runs; and by
a buffer that a forward pass of the first chunk has written, as running statistics, observers and
power iterations do. Optimizers are refused, because what they move can't be put back.

Invariant: a replica exchanges nothing while an attempt runs, for it may fail on one rank: see
`_across`. So a replica that no other rank has exchanges nothing at all, which changes no gradient.
A sharded module that runs here alone exchanges with each micro-batch. What an attempt that failed
has begun to exchange is forgotten, or else the next one would wait for its end; where torch can't
forget, nothing is tried again.

Invariant: in a run that verifies, an operation that would write a parameter raises before it runs.
A parameter that got other data by ``.data =`` gets its own back.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tenure._containers import passed_tensors
from tenure._errors import AdaptiveUsageError, BatchCoupledError
from tenure._text import listed
from tenure._torch.modes import EagerMode, schema_of
from tenure._torch.patches import Patch
from tenure._torch.quiet import without_functions
from tenure._torch.replicas import active_replica, specialities_of
from tenure._torch.sharding import ShardedGroup, Shards, sharded_groups
from tenure._torch.storages import key_of
from tenure._torch.writes import versions_of

from .._ranks import (
    Replicated,
    has_other_replicas,
    is_first_fsdp,
    is_rank,
    kept_apart,
)
from .._reachable import Coupled
from .._undo import ModuleState, modules_below, named_modules


class GradientExchange:
    """Keeps replicas from exchanging gradients; a part of what an attempt changes.

    Args:
        modules: those of the step that are known before it runs; other ranks wait for what a
            replica exchanges, so that those with others have to be known then.

    Attributes:
        is_rank: whether this process is a rank; alone, it has nothing to do.
    """

    __slots__ = (
        "_aside", "_first_fsdp", "_groups", "_is_broken", "_is_ready", "_is_split", "_known",
        "_replicas", "is_rank",
    )  # fmt: skip

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        # without processes there is nobody to exchange with, and most programs have none
        self.is_rank = is_rank()
        self._known: set[int] = set()
        self._replicas: list[Replicated] = []
        self._groups: list[ShardedGroup] = []
        self._first_fsdp: list[nn.Module] = []
        self._aside: ExitStack | None = None
        self._is_broken = self._is_split = self._is_ready = False
        if self.is_rank:
            self.learn(modules)
        self._is_ready = True

    @property
    def is_sharded(self) -> bool:
        """True if a module of ``fully_shard`` is known."""
        return bool(self._groups)

    def learn(self, modules: Iterable[nn.Module]) -> None:
        """Count modules in, before they run for the first time."""
        if not self.is_rank:
            return
        for module in modules:
            if id(module) not in self._known:
                self._learn(module)
                self._known.add(id(module))
        if self._is_split:
            self.check_splittable()

    def _learn(self, module: nn.Module) -> None:
        groups = sharded_groups(module)
        self._refuse_unexchanged(groups)
        if self._is_ready and has_other_replicas(module):
            raise _not_found(f"a DistributedDataParallel of {type(module.module).__name__}")
        # on one rank, too: a verification that began without it would drop its gradients
        if self._is_ready and (groups or Shards([module]).n_ranks > 1):
            raise _not_found(f"a sharded module, {type(module).__name__},")
        self._groups += groups
        if isinstance(module, Replicated):
            _refuse_special(module)
            self._replicas.append(module)
            # one that is learned of in the middle is about to run
            if self._aside is not None:
                self._aside.enter_context(kept_apart(module))
        elif is_first_fsdp(module):
            self._first_fsdp.append(module)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Return a block in which replicas exchange neither gradients nor buffers."""
        # a verification in the middle of a step: what it learns of stays apart until that ends
        if self._aside is not None:
            yield
            return
        with ExitStack() as aside:
            self._aside = aside
            try:
                for module in self._replicas:
                    aside.enter_context(kept_apart(module))
                yield
            finally:
                self._aside = None

    def refuse_active_replica(self) -> None:
        """Make sure that backward passes exchange nothing before all micro-batches have run.

        Raises:
            AdaptiveUsageError: the step runs inside a replica, which it can't keep from that.
        """
        if self.is_rank and (active := active_replica()) and has_other_replicas(active):
            raise AdaptiveUsageError(
                "step() has to split the batch, and runs inside the forward pass of a "
                "DistributedDataParallel, as in a training_step of Lightning. Each micro-batch "
                "would exchange gradients, and ranks with other splits would wait for each other. "
                "Nothing was changed. Call step() outside, with a function that runs the replica; "
                "train on one device; or pass a batch that fits."
            )

    def check_splittable(self) -> None:
        """Make sure that modules may run several times before gradients are exchanged.

        Raises:
            AdaptiveUsageError: one of them may not.
        """
        self._is_split = True
        if self._first_fsdp:
            raise AdaptiveUsageError(
                "step() has to split the batch, and got a module of FullyShardedDataParallel, "
                "which keeps gradients where none of a failed attempt can be told from others. "
                "Nothing was changed. Shard it by fully_shard, or pass a batch that fits."
            )

    def begin(self) -> None:
        """Prepare for an attempt.

        Raises:
            AdaptiveUsageError: gradients of before wait for an exchange, in which new ones can't be
                told from them; or an attempt failed that can't be undone.
        """
        self._is_split = False
        # without other processes there is nothing to look at
        if not self._known:
            return
        if self._is_broken:
            raise AdaptiveUsageError(
                "step() ran out of memory in a module of fully_shard, which torch can't bring back "
                "to what it was. Gradients are as before, but the module is to be made anew. Split "
                "from the beginning: pass maximum=, such as what plan() says for the model without "
                "fully_shard."
            )
        self._refuse_unexchanged(self._groups)
        for module in self._replicas:
            # where new ones are written
            for parameter in module.parameters() if module.gradient_as_bucket_view else ():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()

    def finish(self) -> None:
        """Do nothing: it is done already."""

    def undo(self) -> None:
        """Forget what the attempt has begun to exchange."""
        for group in self._groups:
            group.drop_unexchanged()
        self._is_broken = self.is_sharded

    def _refuse_unexchanged(self, groups: list[ShardedGroup]) -> None:
        if any(group.has_unexchanged for group in groups):
            raise AdaptiveUsageError(
                "step() got a module of fully_shard with gradients that a backward pass without "
                "exchange has left, and that no other can be told from. Nothing was changed. Pass "
                "the samples of both passes to one step(), which accumulates by itself."
            )


def _refuse_special(module: Replicated) -> None:
    if found := specialities_of(module):
        raise AdaptiveUsageError(
            f"step() got a DistributedDataParallel of {type(module.module).__name__} with "
            f"{' and '.join(found)}, which acts while the module runs; nothing may be exchanged "
            "until a step has succeeded. Nothing was changed. Leave it out, or run that module "
            "without step()."
        )


def _not_found(what: str) -> AdaptiveUsageError:
    return AdaptiveUsageError(
        f"step() runs {what} that it has not found through its function, and has to know before "
        "anything runs. Nothing was changed. Pass the model as model=."
    )


def written_modules(roots: Mapping[str, nn.Module], state: ModuleState) -> list[Coupled]:
    """Return the modules with a buffer that was written since it was noted."""
    if not (written := state.written()):
        return []
    # a module that nobody named, such as a metric beside the model, may count what it likes
    names = {module: name for name, module in named_modules(roots)}
    return [
        Coupled(names[module], type(module).__name__, f"each call updates its buffer {key!r}")
        for module, key in written
        if module in names
    ]


_FREEZE = (
    "Freeze them with eval(), use LayerNorm or GroupNorm, or accept statistics of each micro-batch "
    'with batchnorm="per_chunk". If they do not run, pass as model= what does.'
)
_FREEZE_OR_UPDATE = (
    'Freeze them with eval(), or accept statistics of each micro-batch with batchnorm="per_chunk". '
    "Update what is no statistic, such as a queue or a codebook, after step(), once for the batch, "
    "from what has_aux=True returns."
)
UPDATE_AFTER = (
    "Update that after step(), once for the batch, from what has_aux=True returns. Pass what each "
    "sample has of its own, such as a hidden state, in the batch."
)


def refuse_coupled(
    found: list[Coupled], n_samples: int, size: int, *, is_written: bool = False
) -> NoReturn:
    """Say which modules mix the samples.

    Raises:
        BatchCoupledError: always.
    """
    raise BatchCoupledError(
        f"The batch of {n_samples} has to be split into micro-batches of {size}, and "
        f"{listed([*map(str, found)], most=6)} would give other results then. Nothing was "
        f"changed. {_FREEZE_OR_UPDATE if is_written else _FREEZE}",
        tuple(each.name for each in found),
    )


_OptimizerGuard = tuple[str, Container[int] | None, Callable[[Tensor], bool] | None]
"""The name of a block, the identities of parameters that may not move in it, or None for all, and
whether it needs the gradient of a leaf."""
_guarded: dict[int, _OptimizerGuard] = {}
"""The blocks that are open, by thread, so that autograd's own threads find them, too."""


@contextmanager
def no_optimizer_steps(
    name: str,
    parameters: Container[int] | None = None,
    needs: Callable[[Tensor], bool] | None = None,
) -> Iterator[None]:
    """Open a block in which optimizers that step, also in its backward passes, raise.

    Args:
        name: what the error calls the block.
        parameters: the identities of those that may not move; None: no optimizer may step.
        needs: whether the block needs the gradient of a leaf, so that ``zero_grad()`` may not drop
            it; None: it may drop all.

    Raises:
        AdaptiveUsageError: in the block, from ``optimizer.step()`` or ``zero_grad()``, before it
            changes anything.
    """
    _listen()
    zeroing = _zeroing if needs is not None else ()
    for patch in zeroing:
        patch.begin()
    thread = threading.get_ident()
    before, _guarded[thread] = _guarded.get(thread), (name, parameters, needs)
    try:
        yield
    finally:
        for patch in zeroing:
            patch.end()
        # a step inside a step is still inside the outer one, whose guard holds again
        if before is None:
            del _guarded[thread]
        else:
            _guarded[thread] = before


@functools.cache
def _listen() -> None:
    # once and for good: outside of blocks, the hook costs a step of an optimizer one look
    register_optimizer_step_pre_hook(_refuse_inside)


def _refuse_inside(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    guard = _guarded.get(threading.get_ident()) or _guard_of_backward()
    if guard is None:
        return
    name, parameters, _ = guard
    moved = [id(each) for group in optimizer.param_groups for each in group["params"]]
    if parameters is None or any(each in parameters for each in moved):
        raise AdaptiveUsageError(
            f"{type(optimizer).__name__}.step() was called inside {name}(), which may have to run "
            "its function again: an update can't be taken back. Nothing was updated. Call the "
            f"optimizer after {name}()."
        )


def _refusing(zero_grad: Any) -> Any:
    @functools.wraps(zero_grad)
    def refused(self: Any, *args: Any, **kwargs: Any) -> Any:
        for patch in _zeroing:
            patch.was_called()
        name, _, needs = _guarded.get(threading.get_ident(), ("", None, None))
        groups = (
            [{"params": self.parameters()}] if isinstance(self, nn.Module) else self.param_groups
        )
        if needs is not None and any(needs(each) for group in groups for each in group["params"]):
            raise AdaptiveUsageError(
                f"zero_grad() was called inside {name}(), which adds gradients of micro-batches "
                f"to those of before. Nothing was changed. Call it before {name}()."
            )
        return zero_grad(self, *args, **kwargs)

    return refused


_zeroing = [Patch(kind, {"zero_grad": _refusing}, lingers=True) for kind in (nn.Module, Optimizer)]


def _guard_of_backward() -> _OptimizerGuard | None:
    """On a thread of autograd's own, the block that waits for it; of several, the first."""
    # threads of C++ are dummies to Python; a data loader's or a user's are not
    if not _guarded or not isinstance(threading.current_thread(), threading._DummyThread):
        return None
    return next(iter(_guarded.copy().values()), None)


_PLAIN = (Tensor, nn.Parameter)


class WrittenParameters:
    """A check that a function writes no parameter.

    Args:
        entry: what was called.
        function: what errors call the function.
        roots: the modules that it runs, by name, whose parameters are noted as they are.
        captured: other parameters that it uses.
        asks: whether the run is taken back anyway, so that nothing may be written in it.

    Attributes:
        asks: as it was passed.
        error: the last error that was raised.
    """

    def __init__(
        self,
        entry: str,
        function: str,
        roots: Mapping[str, nn.Module],
        captured: Mapping[str, Tensor],
        *,
        asks: bool,
    ) -> None:
        self._entry, self._function, self.asks = entry, function, asks
        self._roots, self._captured = roots, captured
        self.error: AdaptiveUsageError | None = None
        self._noted: list[tuple[Tensor, Tensor]] = []
        with without_functions():
            parameters = [each for each in captured.values() if isinstance(each, nn.Parameter)]
            for module in modules_below(roots.values()):
                # looking rows up renormalizes them, again to the same
                if vars(module).get("max_norm") is None:
                    parameters += [p for p in module._parameters.values() if p is not None]
            for each in parameters:
                # of other classes nobody knows what a write is: sharded, quantized, without data
                if type(each) in _PLAIN and not is_lazy(each):
                    self._noted.append((each, each.detach()))
            self._versions = versions_of([each for each, _ in self._noted])

    def guarded(self) -> AbstractContextManager[Any]:
        """Return a block for a call of the function."""
        return _WriteGuard(self) if self.asks and self._noted else nullcontext()

    def check(self) -> None:
        """Make sure that none was written since they were noted.

        Raises:
            AdaptiveUsageError: one was.
        """
        noted, known = self._noted, self._versions
        self._noted, self._versions = [], []
        written = []
        with without_functions():
            versions = versions_of([each for each, _ in noted])
            for (parameter, data), before, now in zip(noted, known, versions, strict=True):
                # of another class, or without data, nothing tells
                is_plain = type(parameter) in _PLAIN and not parameter.is_meta
                is_elsewhere = is_plain and parameter.data_ptr() != data.data_ptr()
                if is_elsewhere and _has_other_values(parameter, data):
                    parameter.data = data
                elif before == now:
                    continue
                written.append(parameter)
        if written:
            self.refuse(written)

    def refuse(self, written: list[Tensor]) -> None:
        """Say that these would be written.

        Raises:
            AdaptiveUsageError: always.
        """
        names = {id(each): name for name, each in self._captured.items()}
        for name, module in named_modules(self._roots):
            for key, each in module._parameters.items():
                names.setdefault(id(each), f"{name}.{key}")
        called = list(dict.fromkeys([names.get(id(each), "of no name") for each in written]))
        self.error = AdaptiveUsageError(
            f"{self._function!r} writes the parameter {listed(called, most=3)}. {self._entry}() "
            "runs it more than once, and each run would do so again. No gradient was delivered. "
            f"Move weights, such as of a teacher, after {self._entry}() or before it."
        )
        raise self.error

    def by_storage(self) -> dict[int, Tensor]:
        """Return the parameters that were noted, by the keys of their storages."""
        with without_functions():
            return {key_of(data.untyped_storage()): each for each, data in self._noted}


def _has_other_values(parameter: Tensor, data: Tensor) -> bool:
    # a pager moves parameters, and a quantized layer lays them out anew
    kinds = [(each.shape, each.dtype, each.device, each.layout) for each in (parameter, data)]
    return kinds[0] == kinds[1] and not torch.equal(parameter, data)


class _WriteGuard(EagerMode):
    """Raises where an operation is about to write a parameter."""

    supports_higher_order_operators = True

    def __init__(self, written: WrittenParameters) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch left it unannotated
        self._written = written
        self._parameters = written.by_storage()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = schema_of(func)
        if schema is not None and schema.is_mutable:
            given = {**dict(zip((a.name for a in schema.arguments), args, strict=False)), **kwargs}
            written = [
                given.get(each.name)
                for each in schema.arguments
                if each.alias_info is not None and each.alias_info.is_write
            ]
            for tensor in passed_tensors(written):
                if type(tensor) in _PLAIN and tensor.layout is torch.strided:
                    parameter = self._parameters.get(key_of(tensor.untyped_storage()))
                    if parameter is not None:
                        self._written.refuse([parameter])
        return func(*args, **kwargs)
