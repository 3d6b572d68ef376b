"""Runs of a paged model between which all goes from the device, and those of it whole.

Beside the model there is a unit as large as its ring. To use that has all else go, and writes NaN
over its bytes: who reads bytes that are not its own any more gets no number.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from benchmarks._training_steps import Step
from tenure.paging import PagingError, page, plan_paging

N_CYCLES = 3
_FILLER = "filler"

Told = dict[str, list[Any]]
"""Tensors by what they are."""


class Call(NamedTuple):
    """A call of part of a model.

    Attributes:
        part: its name in the model; empty for all of it.
        args: the arguments, on the host.
        kwargs: those by name.
    """

    part: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def call_of(step: Step, family: str) -> Call:
    """The call of a training step's model, without its loss."""
    if isinstance(step.args[0], dict):
        return Call("", (), step.args[0])
    # Detectors compute their losses themselves, of the targets.
    return Call("", step.args if family == "detection" else step.args[:1], {})


def with_eager_experts(model: nn.Module) -> None:
    """Have a mixture of transformers call its experts one by one: else it asks for a histogram."""
    choose = getattr(model, "set_experts_implementation", None)
    if choose is not None:
        choose("eager")


class Evicting(nn.Module):
    """A model beside a unit that is as large as its ring.

    Args:
        model: the model.
        n_bytes: of the ring.
    """

    def __init__(self, model: nn.Module, n_bytes: int) -> None:
        super().__init__()
        self.model = model
        self.filler = nn.Linear(1, max(1, -(-n_bytes // 4)), bias=False, dtype=torch.float32)
        nn.init.constant_(self.filler.requires_grad_(False).weight, torch.nan)

    def forward(self, part: str, *args: Any, **kwargs: Any) -> Any:
        """Call part of the model."""
        return self.model.get_submodule(part)(*args, **kwargs)

    def evict(self) -> None:
        """Have all else go."""
        with torch.no_grad():
            self.filler(torch.ones(1, 1))


class Cycles:
    """A model to page, and the same one whole on the device.

    Args:
        sim: the simulated accelerator.
        model: the model, on the host.
        trains: whether its parameters get gradients, and are stepped after each run.

    Attributes:
        host: the model that is paged.
        there: the other.
    """

    def __init__(self, sim: Any, model: nn.Module, *, trains: bool) -> None:
        self._sim, self._trains = sim, trains
        self.host, self.there = model, moved_whole(model, sim.device)
        self._outer = Evicting(model, least_budget(model, sim.device)).train(model.training)
        self._pages: dict[Any, Any] = {}

    def differences(self, calls: Iterable[Call]) -> list[str]:
        """What three cycles of calls give paged and not whole; nothing, if all is well.

        Raises:
            AssertionError: something stayed on the device that had to go.
        """
        calls = list(calls)
        expected = [self._run(self.there, call, i) for i in range(N_CYCLES) for call in calls]
        budget, device = least_budget(self._outer, self._sim.device), self._sim.device
        with page(self._outer, device, budget=budget, training=self._trains) as handle:
            assert handle.plan.allocated_bytes <= budget
            self._pages = handle._pager.engine.room.pages
            found = [self._run(self.host, call, i) for i in range(N_CYCLES) for call in calls]
        return [
            f"call {number % len(calls)} in cycle {number // len(calls)}: {which}"
            for number, (one, other) in enumerate(zip(found, expected, strict=True))
            for which in one
            if not same_bits(one[which], other[which])
        ]

    def _run(self, model: nn.Module, call: Call, cycle: int) -> Told:
        # Masks of speech are drawn by NumPy, layers to be dropped by Python.
        random.seed(cycle)
        np.random.seed(cycle)
        torch.manual_seed(cycle)
        self._sim.module.manual_seed_all(cycle)
        args, kwargs = tree_map_only(Tensor, self._moved, (call.args, call.kwargs))
        part = model.get_submodule(call.part)
        self._evict(model)
        with torch.set_grad_enabled(self._trains):
            if model is self.host:
                output = self._outer(call.part, *args, **kwargs)
            else:
                output = part(*args, **kwargs)
        self._evict(model)
        outputs = [each for each in tree_leaves(output) if isinstance(each, Tensor)]
        told: Told = {"output": home(outputs)}
        if any(each.requires_grad for each in outputs):
            total(outputs).backward()
            self._evict(model)
            inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
            told["gradients of inputs"] = home(each.grad for each in inputs)
            for name, parameter in part.named_parameters():
                told[f"gradient of {name!r}"] = home([parameter.grad])
            step(part)
        values = part.state_dict()
        return told | {f"value of {name!r}": home([values[name]]) for name in values}

    def _moved(self, tensor: Tensor) -> Tensor:
        asks = self._trains and tensor.requires_grad
        return tensor.detach().to(self._sim.device).requires_grad_(asks)

    def _evict(self, model: nn.Module) -> None:
        if model is self.host:
            before = set(self._pages.values())
            self._outer.evict()
            stayed = before.intersection(self._pages.values())
            assert all(page.is_resident or page.unit.name == _FILLER for page in stayed)


def least_budget(model: nn.Module, device: torch.device) -> int:
    """The smallest budget that a model can be paged in."""
    try:
        return plan_paging(model, device, budget=1).minimum_bytes
    except PagingError as error:
        return error.minimum_bytes or 0


def moved_whole(model: nn.Module, device: torch.device) -> nn.Module:
    """A copy on a device, with the same ties: to move a model to the simulated one parts them."""
    other = copy.deepcopy(model).to(device)
    firsts: dict[int, nn.Parameter] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        first = firsts.setdefault(id(parameter), other.get_parameter(path))
        owner, _, name = path.rpartition(".")
        setattr(other.get_submodule(owner), name, first)
    return other


def total(outputs: list[Tensor]) -> Tensor:
    """A loss of which each element of the outputs has a gradient of its own."""
    generator = torch.Generator().manual_seed(7)

    def weighted(output: Tensor) -> Tensor:
        factor = torch.randn(output.shape, dtype=output.dtype, generator=generator)
        summed = (output * factor.to(output.device)).sum()
        return summed.abs() if summed.is_complex() else summed

    return torch.stack([weighted(each).double() for each in outputs if each.requires_grad]).sum()


def step(module: nn.Module) -> None:
    """Change all parameters, where they are, and forget their gradients."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.01)
    module.zero_grad()


def home(tensors: Iterable[Any]) -> list[Any]:
    """Copies on the host; of what is no tensor, itself."""
    return [each.detach().cpu().clone() if isinstance(each, Tensor) else each for each in tensors]


def same_bits(one: list[Any], other: list[Any]) -> bool:
    """Whether two lists have the same tensors, bit for bit."""
    return len(one) == len(other) and all(map(_is_same, one, other))


def _is_same(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    if (one.shape, one.dtype, one.layout) != (other.shape, other.dtype, other.layout):
        return False
    to_dense: Callable[[Tensor], Tensor] = lambda t: t.to_dense() if t.is_sparse else t  # noqa: E731
    return torch.equal(_bits(to_dense(one)), _bits(to_dense(other)))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
