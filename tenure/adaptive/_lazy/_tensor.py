"""Tensors that are recorded.

Invariant: a call of torch is answered where no data is needed, else recorded; what comes past the
recording is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from tenure._containers import mapped
from tenure._errors import AdaptiveUsageError
from tenure._text import describe_elements, describe_tensor
from tenure._torch.compiler import is_dynamo_compiling, never_compiled

from ._answers import ANSWERS, PROPERTIES
from ._evaluate import value_of
from ._meta import Label
from ._recording import record
from ._tape import Handle, Tape, Value, refuse_own_function


class LazyTensor(Handle):
    """A tensor that was recorded and not computed; see `lazy`."""

    @classmethod
    @never_compiled
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Record the call, or answer it where no data is needed."""
        if is_dynamo_compiling():
            raise AdaptiveUsageError(_COMPILED)
        if func.__name__ == "__get__":
            answer = PROPERTIES.get(func.__self__.__name__)  # type: ignore[attr-defined]
            if answer is not None:
                return answer(args[0])
        answer = ANSWERS.get(func)
        if answer is not None:
            return answer(*args, **(kwargs or {}))
        return record(func, args, dict(kwargs) if kwargs else {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares no class method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse what came past the recording."""
        raise AdaptiveUsageError(
            f"{func} got a tensor of lazy() where its calls can't be recorded, as in compiled code "
            "or in C++ that calls torch. Pass it value(), or use step(), which runs functions "
            "whole."
        )

    def value(self) -> Tensor:
        """Return the tensor itself, computed if it was not."""
        refuse_own_function(self)
        value = value_of(self).detach()
        trains = self._value.meta.requires_grad and torch.is_grad_enabled()
        if not trains or value.is_inference():
            return value
        read: Any = value.requires_grad_().view_as(value)
        # its graph is the recording's own: gradients would end here
        read.grad_fn.register_prehook(_refuse_backward)
        found: Tensor = read
        return found

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Describe it without computing anything."""
        meta = self._value.meta
        what = f"{describe_elements(meta.dtype, meta.shape)} on {meta.device}"
        done = self._value.tensor is not None
        return f"lazy {what}{'' if done else ', not computed yet'}"

    def __str__(self) -> str:
        """Do as the tensor itself."""
        return str(self.value())

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Save it as the tensor itself."""
        return self.value().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        """Copy the computed tensor; one with a graph can't be copied, as in plain torch."""
        return self.value().__deepcopy__(memo)


def _refuse_backward(*_: Any) -> None:
    raise AdaptiveUsageError(
        "What value() gave of a tensor of lazy() was run backward. Call backward() of the "
        "recorded tensor, or detach() what value() gives."
    )


_COMPILED = (
    "A function that torch.compile has compiled was called with a tensor of lazy(): what it "
    "computes can't be recorded. Call the function that is not compiled, or use step()."
)


@never_compiled
def lazy(*values: Any, batch: int = 0) -> Any:
    """Record what is done with tensors, and run it in micro-batches where it does not fit.

    Args:
        *values: tensors, or lists, tuples and dicts of them; other things come back as they are.
        batch: the dimension that has the samples.

    Returns:
        The same with a recorded tensor for each; a tuple where several were given.

    Raises:
        AdaptiveUsageError: a tensor can't be recorded, or has no such dimension.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from tenure.adaptive import lazy
        >>> model = nn.Linear(4, 1)
        >>> x, y = lazy(torch.randn(8, 4), torch.randn(8, 1))
        >>> loss = nn.functional.mse_loss(model(x), y)
        >>> loss
        lazy float32[] on cpu, not computed yet
        >>> loss.backward()
        >>> model.weight.grad.shape
        torch.Size([1, 4])
    """
    tapes: dict[int, Tape] = {}

    def recorded(tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, LazyTensor) else _handle_of(tensor, batch, tapes)

    made = tuple(mapped(recorded, value) for value in values)
    return made[0] if len(made) == 1 else made


def _handle_of(tensor: Tensor, batch: int, tapes: dict[int, Tape]) -> LazyTensor:
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise AdaptiveUsageError(
            f"lazy() got a tensor that is not dense, {describe_tensor(tensor)}. Pass a dense one, "
            "or use step()."
        )
    if not isinstance(batch, Integral) or not -tensor.dim() <= batch < tensor.dim():
        raise AdaptiveUsageError(
            f"lazy() got {describe_tensor(tensor)}, which has no dimension {batch} for its "
            "samples. Leave it a plain tensor if all samples share it."
        )
    dim = batch % tensor.dim()
    n_samples = tensor.shape[dim]
    tape = tapes.setdefault(n_samples, Tape(n_samples))
    value = Value.known(tensor, Label(dim))
    value.given = tensor
    return LazyTensor._of(tape, value)
