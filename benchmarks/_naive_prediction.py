"""The plainest prediction: fake tensors, and a mode that follows their storages.

What every tool does that runs a step on fake tensors: each output of an operator counts until its
storage dies. What a kernel allocates inside, and what it picks, is not known; nothing is corrected.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from benchmarks._step_truth import living_tensors, run
from benchmarks._training_steps import MakeOptimizer, Step
from tenure._storages import total_bytes


def naive_peak(step: Step, make_optimizer: MakeOptimizer) -> int:
    """Peak bytes of a step on fake tensors, those of what lived before included.

    The model is not fit for use afterwards where it keeps tensors that are not its buffers.
    """
    tensors = living_tensors(step, make_optimizer(step.model.parameters()))
    baseline_bytes = total_bytes(tensors)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with faked(step.model, mode):
        args = tree_map_only(Tensor, mode.from_tensor, step.args)
        fake = Step(step.model, step.fn, args)
        optimizer = make_optimizer(step.model.parameters())
        ledger = Ledger()
        ledger.know(living_tensors(fake, optimizer))
        with mode, ledger:
            run(fake, optimizer)
    return baseline_bytes + ledger.peak_bytes


class Ledger(TorchDispatchMode):
    """Bytes of the storages that operators return, as long as these live."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = self._live_bytes = 0
        self._known: dict[int, weakref.ref[UntypedStorage]] = {}
        self._before: list[UntypedStorage] = []

    def know(self, tensors: Iterator[Tensor]) -> None:
        """Storages that lived before are not counted here."""
        for storage in (tensor.untyped_storage() for tensor in tensors):
            self._before.append(storage)
            self._known[id(storage)] = weakref.ref(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count what is new in its result."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: UntypedStorage) -> None:
        key = id(storage)
        if key in self._known:
            return
        n_bytes = storage.nbytes()

        def gone(_: object) -> None:
            del self._known[key]
            self._live_bytes -= n_bytes

        self._known[key] = weakref.ref(storage, gone)
        self._live_bytes += n_bytes
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)


@contextmanager
def faked(model: nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    """The model with fake parameters and buffers, tied ones tied as before."""
    places = [
        (tensors, name, tensor)
        for module in model.modules()
        for tensors in (module._parameters, module._buffers)
        for name, tensor in tensors.items()
        if tensor is not None
    ]
    random = torch.get_rng_state()
    try:
        for tensors, name, tensor in places:
            tensors[name] = mode.from_tensor(tensor)  # type: ignore[assignment]
        yield
    finally:
        for tensors, name, tensor in places:
            tensors[name] = tensor  # type: ignore[assignment]
        torch.set_rng_state(random)
