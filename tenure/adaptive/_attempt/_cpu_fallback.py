"""Running a function on the CPU that did not fit on its device at any size.

Invariant: what it puts into containers of its arguments arrives in them, what it returns is where
the arguments were, and a write into a tensor is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tenure._containers import Survey, entries_of, is_mutable, set_entries
from tenure._errors import AdaptiveUsageError
from tenure._storages import storages_of
from tenure._text import describe_tensor
from tenure._torch.storages import key_of
from tenure._torch.writes import version_of

from .._undo import differing

_CPU = torch.device("cpu")


def on_cpu(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` with the tensors of its arguments on the CPU.

    Modules stay where they are: moving the weights of a user's model is not for a retry to do.

    Raises:
        AdaptiveUsageError: it writes into a tensor of the device.
    """
    # an object has one copy, however often it is given; what needs none stands for itself
    survey = Survey((args, kwargs))
    nodes = survey.nodes.values()
    originals = [node for node in nodes if isinstance(node, Tensor) and node.device != _CPU]
    device = originals[0].device if originals else _CPU
    given: dict[int, Any] = {id(each): each.to(_CPU) for each in originals}
    before = [_state_of(given[id(each)]) for each in originals]
    cpu_args, cpu_kwargs = survey.replaced(given)
    back = {id(given.get(key, node)): node for key, node in survey.nodes.items()}
    # what the ids belong to: an object that is gone would leave its id to another
    kept = [survey]

    def to_device(tree: Any) -> Any:
        found = Survey(tree, back)
        kept.append(found)
        for key, node in found.nodes.items():
            if isinstance(node, Tensor) and key not in back and node.device != device:
                back[key] = node.to(device)
        return found.replaced(back)

    result = function(*cpu_args, **cpu_kwargs)
    for original, state in zip(originals, before, strict=True):
        _refuse_write(original, given[id(original)], state)
    for node in [node for node in nodes if is_mutable(node)]:
        # results are often appended to a list of the caller's
        set_entries(node, to_device(entries_of(given.get(id(node), node))))
    return to_device(result)


def _state_of(tensor: Tensor) -> tuple[object, ...]:
    """Return how often a tensor was written, and where it lies: a resize changes that alone."""
    where = [key_of(storage) for storage in storages_of(tensor)]
    return version_of(tensor), tensor.shape, where


def _refuse_write(original: Tensor, given: Tensor, before: tuple[object, ...]) -> None:
    is_written = _state_of(given) != before
    # tensors of inference count no versions
    if not is_written and before[0] is None:
        is_written = differing([(given, original.to(_CPU))])[0]
    if is_written:
        raise AdaptiveUsageError(
            "cpu_fallback= ran a function on the CPU that writes into an argument, "
            f"{describe_tensor(original)}, of which it has a copy there. Nothing on the device was "
            "changed. Let it return what it computes."
        )
