"""What a recorded tensor is to the recording: its tape, its number, and what is known of it."""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor

from tenure._errors import AdaptiveUsageError
from tenure._torch.swap import make_wrapper, recorded_by_autograd, require_grad

from ._meta import Meta
from ._tape import Tape


class Handle(Tensor):
    """A tensor that was recorded, as the recording sees it."""

    _tape: Tape
    _number: int
    _meta: Meta
    _is_data: bool = False
    _is_given: bool = False

    @classmethod
    def _of(cls, tape: Tape, number: int, meta: Meta) -> Self:
        """Return a handle of a recorded value."""
        made: Any = make_wrapper(
            cls,
            meta.shape,
            strides=meta.stride,
            dtype=meta.dtype,
            device=meta.device,
            requires_grad=meta.requires_grad,
        )
        made._tape, made._number, made._meta = tape, number, meta
        tape.hold(number, made)
        found: Self = made
        return found

    def _become(self, meta: Meta) -> None:
        """Another tensor by now, as one that was written; autograd itself is told, too."""
        self._meta = meta
        # it would record no function of its own of a tensor that requires no grad
        require_grad(self, meta.requires_grad)


def refuse_own_function(tensor: Handle) -> None:
    """Make sure that no function of autograd has made a tensor, past the recording.

    Raises:
        AdaptiveUsageError: one has.
    """
    node = recorded_by_autograd(tensor)
    if node is None:
        return
    name = type(node).__name__
    raise AdaptiveUsageError(
        f"A tensor of lazy() came out of {name.removesuffix('Backward')!r}, a function with a "
        "backward pass of its own (torch.autograd.Function; hooks of modules that run backward and "
        "reentrant checkpoints are such, too): its calls can't be recorded, and its gradient would "
        "be lost. Use step() for this model, or checkpoint with use_reentrant=False."
    )
