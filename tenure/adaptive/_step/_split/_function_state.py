"""What a function of the user's may change as it runs, where all of that is brought back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..._reachable import Reachable, StepModels
from ..._undo import AllOf
from .._gradients import IsolatedGradients
from ._parts import devices_of, parameters_of
from ._state import StepState


class FunctionState(AllOf):
    """Gradients, random state and the state of the modules that a function reaches.

    Args:
        fn: the function; what its code names is known before it runs.

    Attributes:
        devices: those of the tensors that it reaches.
        reached: what the function uses.
        parameters: the identities of the leaves that were there before it ran; they live as long.
    """

    __slots__ = ("_gradients", "_leaves", "_models", "_state", "devices", "parameters", "reached")

    def __init__(self, fn: Callable[..., Any]) -> None:
        found = Reachable(fn)
        self._models = StepModels(dict(found.modules), (), is_given=False)
        self.reached = [fn, *found.visited(), *self._models.all]
        self._leaves = [*parameters_of(self._models.all), *found.captured()]
        self.devices: list[torch.device] = devices_of(list(self._leaves))
        self.parameters = frozenset(map(id, self._leaves))
        generators = found.all_generators(self._models.all)
        self._state = StepState(self._models, self.devices, generators)
        self._gradients = IsolatedGradients(self._leaves)
        super().__init__((self._gradients, self._state))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Return a block whose modules are known by running, and noted before they change."""
        with self._models.seeing(), self._models.telling(self._learn):
            yield

    def _learn(self, new: list[nn.Module]) -> None:
        self._state.learn(new)
        self._gradients.watch(parameters_of(new))
