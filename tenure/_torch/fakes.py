"""Tensors without data: what torch calls fake, and the errors of operations that need data."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from . import bound
from .modes import all_modes
from .patches import Patch

_PREDICTION = "predictions of memory"
_HOME = "torch._subclasses.fake_tensor"
FakeTensor: Any = bound(f"{_HOME}.FakeTensor", _PREDICTION)
FakeMode: Any = bound(f"{_HOME}.FakeTensorMode", _PREDICTION)
no_fakes: Any = bound(f"{_HOME}.unset_fake_temporarily", _PREDICTION)
"""A context in which operations are on real tensors, inside of a block that has fake ones."""
negative_view: Any = bound("torch._neg_view", _PREDICTION)
NEEDS_DATA: tuple[type[Exception], ...] = (
    bound(f"{_HOME}.DataDependentOutputException", _PREDICTION),
    bound(f"{_HOME}.DynamicOutputShapeException", _PREDICTION),
)
"""What an operation raises whose result depends on values."""
UNKNOWN: type[Exception] = bound(f"{_HOME}.UnsupportedOperatorException", _PREDICTION)
"""What an operation raises of which no shape is known without running it."""


class _NoValue:
    pass


unrecognised = Patch("torch._subclasses", {"FakeTensor": lambda _: _NoValue}).block
"""A block in which a library that asks for fakes by their name in a package sees none.

transformers takes another way for those, as it does while it is compiled.
"""


def saving_on_host(told: Any) -> AbstractContextManager[None]:
    """Return a block in which ``save_on_cpu`` copies tensors without data, even if on the CPU.

    Args:
        told: its ``is_offloading`` is True while one is copied to the host.
    """

    def copying(found: Any) -> Any:
        def init(hooks: Any, *args: Any, **kwargs: Any) -> None:
            found(hooks, *args, **kwargs)
            pack, unpack = hooks.pack_hook, hooks.unpack_hook

            def copied(tensor: Tensor) -> Any:
                if not is_fake(tensor):
                    return pack(tensor)
                told.is_offloading = True
                try:
                    return tensor.clone()
                finally:
                    told.is_offloading = False

            hooks.pack_hook = copied
            hooks.unpack_hook = lambda kept: kept.clone() if is_fake(kept) else unpack(kept)

        return init

    return Patch(torch.autograd.graph.save_on_cpu, {"__init__": copying}).block()


@contextmanager
def unlogged(name: str = _HOME) -> Iterator[None]:
    """Return a block in which a module of torch logs nothing, such as missing fakes."""
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def are_made() -> bool:
    """Return whether the operations of this thread are on tensors without data."""
    return any(isinstance(mode, FakeMode) for mode in all_modes())


def new_mode() -> Any:
    """Return a mode that makes tensors without data, accepts real ones, and runs no kernel."""
    return FakeMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)


@contextmanager
def building(mode: Any) -> Iterator[None]:
    """Return a block in which models are made without data, and may be converted, as by ``half()``.

    torch converts a parameter without data by exchanging it with another one, and refuses to where
    there is a weak reference to it. The mode has one to all that operations return, and needs it
    only where a kernel returns what it was given.
    """
    converter = mode.fake_tensor_converter
    converter.set_tensor_memo = lambda *_: None
    try:
        with mode, warnings.catch_warnings():
            # copy.deepcopy() of a parameter asks whether it has data: no bug of the program
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            yield
    finally:
        del converter.set_tensor_memo


def is_fake(value: object) -> bool:
    """Return whether it is a tensor without data."""
    return isinstance(value, FakeTensor)


def mode_of(fake: Any) -> Any:
    """Return the mode that made a tensor without data."""
    return fake.fake_mode


def fake_of(tensor: Tensor, mode: Any, device: torch.device) -> Any:
    """Return a tensor like a real one, or one of ``meta``, without its data, on a device."""
    if tensor.device == device:
        return mode.from_tensor(tensor)
    fake = like(tensor, mode, device)
    if tensor.is_leaf and tensor.grad is not None:
        fake.grad = fake_of(tensor.grad, mode, device)
    # what isinstance() asks for
    if isinstance(tensor, nn.Parameter):
        fake._is_param = True
    return fake.requires_grad_(tensor.requires_grad)


def like(real: Tensor, mode: Any, device: torch.device) -> Any:
    """Return a tensor without data, laid out as a real one, on a device."""
    with mode, torch.no_grad():
        return torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=device)
