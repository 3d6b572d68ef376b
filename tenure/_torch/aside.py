"""Operations of the pager that nothing of the program sees: no mode, no graph, no transform."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_C: Any = torch._C


@contextmanager
def aside() -> Iterator[None]:
    """A block whose tensors no scope owns, no mode sees and no graph or transform records.

    For plain tensors: a subclass that is made of others does nothing of its own here.
    """
    with (
        _C._DisableTorchDispatch(),  # as of FakeTensorMode, which would give copies no address
        _unrecorded(),
    ):
        yield


@contextmanager
def aside_with_subclasses() -> Iterator[None]:
    """The same for tensors of any class: without their own dispatch they have no bytes to copy."""
    with _disable_current_modes(), _unrecorded():
        yield


@contextmanager
def _unrecorded() -> Iterator[None]:
    with (
        _C.DisableTorchFunction(),
        _C._DisableFuncTorch(),  # torch.func wraps what is made inside of it
        torch.inference_mode(False),
        torch.no_grad(),
    ):
        yield


def works() -> bool:
    """Whether a dispatch mode and a transform see nothing of such blocks."""
    seen: list[object] = []

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    def transformed(x: torch.Tensor) -> torch.Tensor:
        for block in (aside, aside_with_subclasses):
            with Seeing(), block():  # type: ignore[no-untyped-call]  # torch left it unannotated
                made = torch.ones(1, device="cpu") + 1
            assert type(made) is torch.Tensor
            seen.extend([None] * _C._functorch.is_functorch_wrapped_tensor(made))
        return x * 2

    torch.func.vmap(transformed)(torch.ones(2))
    return not seen
