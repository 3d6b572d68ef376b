"""What `step` and `check_split` have to know before they run: samples, modules, gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tenure._torch.quiet import without_functions

from ..._callables import short_name_of
from ..._undo import generators_in
from .._gradients import IsolatedGradients
from .._modules import Reachable, StepModels, coupled_modules, modules_given
from .._samples import CutInputs, SampleDims, SampleTree
from ._run import StepRun
from ._spec import StepSpec
from ._state import StepState


class StepSetup:
    """The parts of one call.

    Args:
        spec: what the loss is.
        batch: the batch.
        in_dims: where it has its samples.
        model: the modules; None to look for them.

    Attributes:
        name: what errors and events call the work.
        n_samples: the samples of the batch.
        leaves: the parts of the batch.
        values: what they hold.
        smallest: the fewest samples that its modules can run on.
        roots: the modules that the function runs, by name.
        rng: random state.
        state: random state, buffers and attributes of modules.
        gradients: the gradients.
        leaf_names: names of tensors that are no parameters of a module, by id.
        run: runs the step at a size.
    """

    def __init__(
        self,
        spec: StepSpec,
        batch: Any,
        in_dims: SampleDims,
        model: nn.Module | Iterable[nn.Module] | None,
    ) -> None:
        tree = SampleTree(batch, in_dims, name="batch", argument="in_dims")
        self.leaves = tree.leaves
        self.n_samples = tree.n_samples()
        self.values = tuple(leaf.value for leaf in tree.leaves)
        self.name = short_name_of(spec.fn)
        found = Reachable(spec.fn)
        rest = Reachable(spec.loss if callable(spec.loss) else None, spec.then, spec.once)
        given = {leaf.path: leaf.value for leaf in tree.leaves if isinstance(leaf.value, nn.Module)}
        roots = found.modules | given if model is None else modules_given(spec.entry, model)
        others = [*found.modules.values(), *rest.modules.values()]
        models = StepModels(roots, others, is_given=model is not None)
        self.roots = models.roots
        per_chunk = spec.batchnorm == "per_chunk" and coupled_modules(self.roots)
        self.smallest = 2 if per_chunk else 1
        inputs = CutInputs(tree, batch)
        captured = [*found.captured(), *rest.captured()]
        leaves = [*_parameters_of(models.all), *captured, *inputs.leaves]
        devices = _devices([*leaves, *self.values])
        generators = [*generators_in(self.values), *found.generators, *rest.generators]
        self.state = StepState(models, devices, generators)
        self.rng = self.state.rng
        self.gradients = IsolatedGradients(leaves)
        tensors = found.tensors | rest.tensors
        self.leaf_names = {id(tensor): name for name, tensor in tensors.items()}
        # one that the function itself lets require grad has a gradient of no interest
        self.leaf_names |= {
            id(leaf.value): leaf.path
            for leaf in tree.leaves
            if isinstance(leaf.value, Tensor) and leaf.value.requires_grad
        }
        self.run = StepRun(
            spec,
            inputs,
            self.n_samples,
            models=models,
            state=self.state,
            gradients=self.gradients,
            computed=lambda: [*found.computed(), *rest.computed()],
            devices=devices,
        )


def _parameters_of(modules: Iterable[nn.Module]) -> list[Tensor]:
    found = (p for module in modules for p in module._parameters.values() if p is not None)
    return list({id(parameter): parameter for parameter in found}.values())


def _devices(values: list[Any]) -> list[torch.device]:
    with without_functions():
        return list(dict.fromkeys(value.device for value in values if isinstance(value, Tensor)))
