"""What `step` and `check_split` have to know before they run: samples, modules, gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._callables import short_name_of
from .._retry import (
    AttributeState,
    BufferState,
    Generator,
    ModeState,
    RngState,
    Together,
    attributes_of,
    generators_in,
    modules_below,
)
from .._torch_dispatch import without_functions
from ._coupled import coupled_modules
from ._cut_inputs import CutInputs
from ._gradients import IsolatedGradients
from ._reachable import Reachable, modules_given
from ._run import StepRun
from ._sample_tree import SampleDims, SampleTree
from ._spec import StepSpec


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
        values: what the batch holds.
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
        self.n_samples = tree.n_samples()
        self.values = tuple(leaf.value for leaf in tree.leaves)
        self.name = short_name_of(spec.fn)
        found = Reachable(spec.fn)
        rest = Reachable(spec.loss if callable(spec.loss) else None, spec.then, spec.once)
        given = {leaf.path: leaf.value for leaf in tree.leaves if isinstance(leaf.value, nn.Module)}
        self.roots = found.modules | given if model is None else modules_given(spec.entry, model)
        per_chunk = spec.batchnorm == "per_chunk" and coupled_modules(self.roots)
        self.smallest = 2 if per_chunk else 1
        used = _used([*self.roots.values()], [found, rest], self.values)
        inputs = CutInputs(tree, batch)
        leaves = [*used.leaves, *inputs.leaves]
        devices = _devices([*leaves, *self.values])
        buffers = BufferState(used.models)
        self.rng = RngState(devices, used.generators)
        self.state = Together(
            (self.rng, ModeState(used.models), AttributeState(used.models), buffers)
        )
        self.gradients = IsolatedGradients(leaves)
        self.leaf_names = {id(tensor): name for name, tensor in used.tensors.items()}
        self.leaf_names |= {id(leaf.value): leaf.path for leaf in tree.leaves}
        self.run = StepRun(
            spec,
            inputs,
            self.n_samples,
            roots=self.roots,
            models=used.models,
            buffers=buffers,
            generators=used.generators,
            state=self.state,
            gradients=self.gradients,
            computed=lambda: [*found.computed(), *rest.computed()],
            devices=devices,
        )


class _Used(NamedTuple):
    """All that the functions of a step use.

    Attributes:
        models: modules, each with what is below it.
        leaves: their parameters, and other leaves that require grad.
        tensors: tensors that are no parameters of a module, by name.
        generators: generators of random numbers.
    """

    models: list[nn.Module]
    leaves: list[Tensor]
    tensors: dict[str, Tensor]
    generators: list[Generator]


def _used(
    roots: Iterable[nn.Module], reachable: Sequence[Reachable], values: Iterable[Any]
) -> _Used:
    models = dict.fromkeys(roots)
    models |= dict.fromkeys(module for each in reachable for module in each.modules.values())
    modules = modules_below(models)
    attributes = (value for module in modules for value in attributes_of(module).values())
    generators = generators_in((*values, *attributes))
    leaves = _parameters_of(modules)
    tensors: dict[str, Tensor] = {}
    for each in reachable:
        generators += each.generators
        leaves += each.captured()
        tensors |= each.tensors
    return _Used(list(models), leaves, tensors, generators)


def _parameters_of(modules: Iterable[nn.Module]) -> list[Tensor]:
    found = (p for module in modules for p in module._parameters.values() if p is not None)
    return list({id(parameter): parameter for parameter in found}.values())


def _devices(values: list[Any]) -> list[torch.device]:
    with without_functions():
        return list(dict.fromkeys(value.device for value in values if isinstance(value, Tensor)))
