"""What a step changes besides gradients, and when there is no way back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..._reachable import StepModels, generators_of
from ..._undo import AllOf, Generator, GradMode, ModuleState, RngState
from .._gradients import IsolatedGradients
from .._modules import GradientExchange


class StepState(AllOf):
    """Random state and the state of modules.

    Args:
        models: the modules that are known now; `learn` notes those that are seen later.
        devices: where the work is done.
        generators: generators of random numbers that are known now.

    Attributes:
        generators: generators of the user's own.
        mode: whether gradients are recorded.
        rng: random state.
        modules: the state of modules.
    """

    __slots__ = ("_devices", "generators", "mode", "modules", "rng")

    def __init__(
        self,
        models: StepModels,
        devices: Sequence[torch.device],
        generators: list[Generator],
    ) -> None:
        self._devices = devices
        self.generators = generators
        self.rng = RngState(devices, self.generators)
        self.modules = ModuleState(models.all)
        self.mode = GradMode()
        # the mode is undone last: to undo the others takes blocks without gradients, too
        super().__init__((self.mode, self.rng, self.modules))

    def learn(self, new: list[nn.Module]) -> None:
        """Note modules that were seen in the middle of an attempt."""
        generators = generators_of(new)
        # the list of the attempt, so that a later `random_now` has them too
        self.generators += generators
        self.rng.add(generators)
        self.modules.add(new)

    def random_now(self) -> RngState:
        """Random state as it is at this moment, to come back to in the middle of an attempt."""
        now = RngState(self._devices, self.generators)
        now.begin()
        return now


class DeliveredTogether(AllOf):
    """Gradients and all other state of a step: both are as before, or both as after it.

    What comes between the first gradient that is delivered and the end of the attempt, such as an
    interrupt, finds the step done.
    """

    __slots__ = ("_gradients", "_mode")

    def __init__(
        self, exchange: GradientExchange, gradients: IsolatedGradients, state: StepState
    ) -> None:
        # gradients are delivered first: that may fail, and then the rest is brought back too
        super().__init__((exchange, gradients, state))
        self._gradients = gradients
        self._mode = state.mode

    def undo(self) -> None:
        """Bring both back, or finish both."""
        # from here on the user may have seen gradients: see
        # test_an_interrupt_finds_all_gradients_delivered_or_none
        if self._gradients.is_delivered:
            self.finish()
            self._mode.undo()
        else:
            super().undo()
