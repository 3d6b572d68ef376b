"""Work that runs on tensors without data: real ones lend their handles to fakes for a while.

Invariant: after the block each handle has the tensor, the class and the attributes that it had; no
value was written, and no gradient. Whoever holds a handle (a module, an optimizer, a closure) sees
the fake in the meantime, so that nothing has to be found but the tensors themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tenure._errors import PredictionError, TenureError
from tenure._storages import inner_tensors
from tenure._torch.autograd import carry_hooks_over, require_hooks
from tenure._torch.fakes import FakeTensor, fake_of, is_fake, mode_of, new_mode
from tenure._torch.quiet import set_class, without_functions
from tenure._torch.sharding import Shards, is_dtensor
from tenure._torch.swap import swap

from ._target import Target


class _LentHandle(NamedTuple):
    """A handle that shows a fake.

    Attributes:
        handle: the user's.
        twin: the handle that has the real tensor in the meantime.
        cls: the class of the real tensor.
        attributes: its attributes.
    """

    handle: Any
    twin: Any
    cls: type[Tensor]
    attributes: dict[str, Any]


def mode_for(tensors: Iterable[Tensor]) -> Any:
    """Return the mode whose fakes are among ``tensors``; else a new one."""
    return next((mode_of(tensor) for tensor in tensors if is_fake(tensor)), None) or new_mode()


@contextmanager
def lent_to_fakes(
    tensors: Iterable[Tensor], mode: Any, target: Target
) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Return a block in which tensors have no data.

    Args:
        tensors: of any shape, dtype, layout and device.
        mode: a mode of `tenure._torch.fakes`; it is not entered here.
        target: where they appear.

    Yields:
        Pairs of a handle that shows a fake and one that has the real tensor in the meantime.
    """
    require_hooks()
    pairs: list[tuple[Tensor, Tensor]] = []
    with ExitStack() as back:
        with without_functions():
            torch.clear_autocast_cache()
            for tensor in tensors:
                if is_fake(tensor):
                    back.callback(_put_gradient, tensor, tensor.grad if tensor.is_leaf else None)
                else:
                    _check(tensor)
                    lent = _lend(tensor, mode, target.place_of(tensor))
                    back.callback(_take_back, lent)
                    pairs.append((lent.handle, lent.twin))
        # autocast refers weakly to what it has cast, and nothing can be swapped then; it is a cache
        back.callback(torch.clear_autocast_cache)
        yield pairs


def _lend(handle: Any, mode: Any, device: torch.device) -> _LentHandle:
    twin = fake_of(handle, mode, device)
    lent = _LentHandle(handle, twin, type(handle), handle.__dict__)
    seen = {**lent.attributes, **twin.__dict__}
    _swap(handle, twin, lent.cls)
    handle.__dict__ = seen
    set_class(twin, lent.cls)
    carry_hooks_over(handle)
    return lent


def _check(tensor: Tensor) -> None:
    """Refuse what no fake can stand for.

    Raises:
        PredictionError: it is a tensor of a class of its own, nested, or has a graph.
    """
    if is_lazy(tensor):
        what, advice = "has no shape yet", "Run the model once, so that its lazy modules are made"
    elif type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
        what = f"is a {type(tensor).__name__}, whose class has a way of its own with operations"
        advice = "Predict with plain tensors of the same sizes"
    elif tensor.is_nested:
        what, advice = "is nested, and has no one shape", "Predict with a padded tensor"
    elif not tensor.is_leaf:
        what = "comes of a computation from before, whose graph a prediction would run backward"
        advice = "Detach it, or compute it inside the function"
    else:
        return
    raise PredictionError(
        f"The memory of this work can't be predicted: a tensor that it uses {what}. {advice}."
    )


def _swap(handle: Any, twin: Any, cls: type[Tensor]) -> None:
    set_class(handle, FakeTensor)
    try:
        swap(handle, twin)
    except RuntimeError as error:
        set_class(handle, cls)
        if isinstance(error, TenureError):
            raise
        raise PredictionError(
            "The memory of this work can't be predicted: code in C++ refers weakly to a tensor of "
            f"shape {tuple(handle.shape)}, which can't be put aside for the time being. Let go of "
            "what came of it before, or predict with a copy."
        ) from error


def _take_back(lent: _LentHandle) -> None:
    with without_functions():
        set_class(lent.twin, FakeTensor)
        swap(lent.handle, lent.twin)
        set_class(lent.handle, lent.cls)
        lent.handle.__dict__ = lent.attributes


def _put_gradient(tensor: Tensor, gradient: Tensor | None) -> None:
    if tensor.is_leaf:
        tensor.grad = gradient


# --- tensors of which each rank has a part


def parts_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return tensors with data: parts instead of those that are shared, and of their gradients.

    Of a shared tensor each rank has a part, and the whole keeps its class: operations come to the
    class first, which does them with the parts, on every rank alone.
    """
    found: dict[int, Tensor] = {}
    for tensor in tensors:
        parts = [tensor]
        if is_dtensor(tensor):
            parts = inner_tensors(tensor)
            # that of a plain tensor is lent with it
            if tensor.is_leaf and tensor.grad is not None:
                parts += parts_of([tensor.grad])
        found |= {id(part): part for part in parts}
    return list(found.values())


@contextmanager
def gradients_kept(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Return a block after which shared leaves have the gradients that they had."""
    before = [(each, each.grad) for each in tensors if is_dtensor(each) and each.is_leaf]
    try:
        yield
    finally:
        for leaf, gradient in before:
            leaf.grad = gradient


def check_between_passes(shards: Shards) -> None:
    """Make sure that nothing of a pass is left, in which what is predicted would be added.

    Raises:
        PredictionError: a module of ``fully_shard`` waits for an exchange.
    """
    if shards.is_exchanging:
        raise PredictionError(
            "The memory of this work can't be predicted: a module of fully_shard has gradients or "
            "parameters that wait for an exchange with other ranks. Predict before the first pass, "
            "or after a backward pass that exchanges."
        )
