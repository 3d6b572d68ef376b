"""What a step changes besides gradients, and when there is no way back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from ..._undo import AllOf, Generator, ModuleState, RngState
from .._gradients import IsolatedGradients
from .._modules import StepModels, generators_of


class StepState(AllOf):
    """Random state and the state of modules.

    Args:
        models: the modules that are known now; `learn` notes those that are seen later.
        devices: where the work is done.
        generators: generators of random numbers that belong to no module.

    Attributes:
        generators: all of the user's own.
        rng: random state.
        modules: the state of modules.
    """

    __slots__ = ("generators", "modules", "rng")

    def __init__(
        self,
        models: StepModels,
        devices: Sequence[torch.device],
        generators: Iterable[Generator],
    ) -> None:
        self.generators = [*generators, *models.generators()]
        self.rng = RngState(devices, self.generators)
        self.modules = ModuleState(models.all)
        super().__init__((self.rng, self.modules))

    def learn(self, new: list[nn.Module]) -> None:
        """Note modules that were seen in the middle of an attempt."""
        generators = generators_of(new)
        self.generators += generators
        self.rng.add(generators)
        self.modules.add(new)


class DeliveredTogether(AllOf):
    """Gradients and all other state of a step: both are as before, or both as after it.

    What comes between the first gradient that is delivered and the end of the attempt, such as an
    interrupt, finds the step done.
    """

    __slots__ = ("_gradients",)

    def __init__(self, gradients: IsolatedGradients, state: StepState) -> None:
        # gradients are delivered first: that may fail, and then the rest is brought back too
        super().__init__((gradients, state))
        self._gradients = gradients

    def undo(self) -> None:
        """Bring both back, or finish both."""
        if self._gradients.is_delivered:
            self.finish()
        else:
            super().undo()
