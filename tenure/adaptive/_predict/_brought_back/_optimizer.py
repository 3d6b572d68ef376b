"""What an optimizer's step changes in the optimizer, taken back after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

from torch import Tensor
from torch.optim import Optimizer, SparseAdam

from tenure._containers import tensors_in
from tenure._errors import PredictionError

from ._containers import Containers


class OptimizerState:
    """Parameters and state of an optimizer, or of none."""

    def __init__(self, optimizer: Optimizer | None) -> None:
        self._optimizer: Any = optimizer

    @property
    def parameters(self) -> list[Tensor]:
        """What it steps."""
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        return [p for group in groups for p in group["params"]]

    def tensors(self) -> list[Tensor]:
        """Return the tensors that it keeps for its parameters."""
        if self._optimizer is None:
            return []
        known = {id(p) for p in self.parameters}
        kept = tensors_in([dict(self._optimizer.state), *self._plain_attributes()])
        return [tensor for tensor in kept if id(tensor) not in known]

    def _plain_attributes(self) -> list[Any]:
        return [v for k, v in vars(self._optimizer).items() if k not in ("state", "param_groups")]

    def step(self, closure: Callable[[], Any]) -> None:
        """Step it, if there is one; one that wants a closure gets that of the work.

        Raises:
            PredictionError: it is SparseAdam, whose step works on rows of sparse gradients.
        """
        if self._optimizer is None:
            return
        # without data a sparse gradient has no rows, and the step takes nothing for them
        if isinstance(self._optimizer, SparseAdam):
            raise PredictionError(
                "The memory of a step of SparseAdam can't be predicted: how many rows its "
                "gradients have depends on values. Predict without optimizer=. Then add its state, "
                "twice its parameters, and for the step about seven times the gradients."
            )
        wanted = signature(self._optimizer.step).parameters.get("closure")
        if wanted is not None and wanted.default is wanted.empty:
            self._optimizer.step(closure)
        else:
            self._optimizer.step()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Return a block after which its attributes, groups and states are as before."""
        optimizer = self._optimizer
        if optimizer is None:
            yield
            return
        before = Containers([vars(optimizer)])
        try:
            yield
        finally:
            before.undo()
