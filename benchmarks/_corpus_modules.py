"""The modules of torch's own `module_db`, each with the samples that torch tests it with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

_DTYPE = torch.float64


class Sample(NamedTuple):
    """A module on the host, and the arguments of a forward."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def names() -> list[str]:
    """All of them."""
    return sorted(_infos())


def differs_in_training(name: str) -> bool:
    """Whether a module computes something else in training mode."""
    return bool(_infos()[name].train_and_eval_differ)


def samples_of(name: str, *, training: bool, most: int | None = None) -> list[Sample]:
    """The samples of one, the same ones each time.

    Args:
        name: as torch has it, such as `nn.Linear`.
        training: the mode of the modules.
        most: how many, at even distances; None for all.
    """
    torch.manual_seed(0)
    found = list(_samples(_infos()[name], training=training))
    every = 1 if most is None else max(1, -(-len(found) // most))
    return found[::every]


def _samples(info: Any, *, training: bool) -> Iterator[Sample]:
    options = {"device": "cpu", "dtype": _DTYPE, "requires_grad": True, "training": training}
    for each in info.module_inputs_func(info, **options):
        made, given = each.constructor_input, each.forward_input
        module = info.module_cls(*made.args, **made.kwargs).to(_DTYPE).train(training)
        if info.is_lazy:
            # Its first forward makes its parameters; none can be paged before.
            module(*given.args, **given.kwargs)
        yield Sample(module, tuple(given.args), given.kwargs)


def _infos() -> dict[str, Any]:
    # Late: it takes as long to import as a hundred of them to run.
    from torch.testing._internal.common_modules import module_db

    return {info.name: info for info in module_db}
