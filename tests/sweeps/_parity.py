"""Parity: an operator on the device gives what it gives on the CPU, forward and backward.

The samples are torch's own, from the OpInfo database; random operators draw the same numbers,
because both generators are seeded alike before each run.
"""

import contextlib
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.testing import assert_close
from torch.utils._pytree import tree_flatten, tree_map_only

from .samples import samples_of

_DTYPES = (torch.float32, torch.complex64, torch.int64, torch.bool)
# Set on each generator by itself: torch.manual_seed also queues a call, with its traceback, for
# every kind of accelerator that is not there.
_SEED = 2026

# Their result is memory that nothing has written: only its geometry can agree.
_UNWRITTEN = {
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
}

# An argument that CUDA wants on the host too.
_HOST_ARGUMENTS = {"tensor_split"}

# The device takes another path to the result than the CPU: math instead of flash attention.
_OTHER_PATH = {"nn.functional.scaled_dot_product_attention"}


class Mismatch(AssertionError):
    """The device's result differs from the CPU's."""


class NotOnCpu(Exception):
    """The CPU itself does not run this operator, or this sample of it."""


def check_operator(info: Any, device: torch.device, n_samples: int) -> int:
    """Compare the first `n_samples` samples of an OpInfo on both devices.

    Returns:
        How many samples were compared: fewer where the CPU refuses one.

    Raises:
        Mismatch: a result or a gradient differs.
        Exception: the operator does not run on the device.
    """
    n_compared = 0
    with warnings.catch_warnings():
        # What torch warns of in its own samples is no matter of the device; _check_sample looks at
        # what only the device warns of.
        warnings.simplefilter("ignore")
        for sample in _samples(info, n_samples):
            with contextlib.suppress(NotOnCpu):
                _check_sample(info, sample, device)
                n_compared += 1
    return n_compared


def _samples(info: Any, n_samples: int) -> list[Any]:
    supported = info.supported_dtypes("cpu")
    dtype = next((candidate for candidate in _DTYPES if candidate in supported), None)
    if dtype is None:
        return []
    differentiable = info.supports_autograd and dtype in info.supported_backward_dtypes("cpu")
    return list(samples_of(info, dtype, n_samples, grad=differentiable))


def _check_sample(info: Any, sample: Any, device: torch.device) -> None:
    cpu = torch.device("cpu")
    host_arguments = _arguments(info, sample, cpu)
    device_arguments = _arguments(info, sample, device)
    try:
        torch.default_generator.manual_seed(_SEED)
        expected, host_warnings = _run(info, host_arguments)
    except Exception as error:
        raise NotOnCpu from error
    torch.get_device_module(device).manual_seed(_SEED)
    actual, device_warnings = _run(info, device_arguments)
    if device_warnings - host_warnings:
        raise Mismatch(f"only the device warns: {min(device_warnings - host_warnings)}")
    if info.name in _UNWRITTEN:
        expected, actual = tree_map_only(torch.Tensor, torch.zeros_like, (expected, actual))
    loose = info.name in _OTHER_PATH
    _compare(actual, expected, device, loose=loose)
    _compare_gradients(actual, expected, (device_arguments, host_arguments), device, loose=loose)


def _arguments(info: Any, sample: Any, device: torch.device) -> Any:
    """The sample's `(input, args, kwargs)` with every tensor and device moved to `device`."""

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad)

    tree = (sample.input, sample.args, dict(sample.kwargs))
    if not any(isinstance(leaf, torch.Tensor) for leaf in tree_flatten(tree)[0]):
        tree[2]["device"] = device
    first, args, kwargs = tree_map_only(str, lambda text: device if text == "cpu" else text, tree)
    first = tree_map_only(torch.Tensor, copy, first)
    if info.name not in _HOST_ARGUMENTS:
        args, kwargs = tree_map_only(torch.Tensor, copy, (args, kwargs))
    return tree_map_only(torch.device, lambda _: device, (first, args, kwargs))


def _run(info: Any, arguments: Any) -> tuple[Any, set[str]]:
    """The result, and the first sentence of each warning."""
    first, args, kwargs = arguments
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = info.op(first, *args, **kwargs)
    return result, {str(warning.message).partition(".")[0] for warning in caught}


def _compare_gradients(
    actual: Any,
    expected: Any,
    arguments: tuple[Any, Any],
    device: torch.device,
    *,
    loose: bool,
) -> None:
    try:
        theirs = _gradients(expected, arguments[1])
    except RuntimeError:
        return  # not differentiable at this sample
    _compare(_gradients(actual, arguments[0]), theirs, device, loose=loose)


def _gradients(result: Any, arguments: Any) -> list[torch.Tensor | None]:
    outputs, inputs = _requiring_grad(result), _requiring_grad(arguments)
    if not outputs or not inputs:
        return []
    ones = [torch.ones_like(output) for output in outputs]
    return list(torch.autograd.grad(outputs, inputs, ones, allow_unused=True))


def _requiring_grad(tree: Any) -> list[torch.Tensor]:
    tensors = [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]
    return [tensor for tensor in tensors if tensor.requires_grad]


def _compare(actual: Any, expected: Any, device: torch.device, *, loose: bool) -> None:
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if loose else {}
    for mine, theirs in zip(tree_flatten(actual)[0], tree_flatten(expected)[0], strict=True):
        if not isinstance(theirs, torch.Tensor):
            continue
        if mine.device != device:
            raise Mismatch(f"the result lies on {mine.device}")
        try:
            assert_close(mine.cpu(), theirs, equal_nan=True, **tolerance)
        except AssertionError as error:
            raise Mismatch(str(error).splitlines()[0]) from error


@dataclass(slots=True)
class Sweep:
    """What a sweep found: operators that agree, that the CPU does not run, that fail and why."""

    agreeing: list[str] = field(default_factory=list)
    not_on_cpu: list[str] = field(default_factory=list)
    failing: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{len(self.agreeing)} operators agree with the CPU"]
        lines += [f"{len(self.not_on_cpu)} do not run on the CPU: {', '.join(self.not_on_cpu)}"]
        lines += [f"{len(self.failing)} fail on the device"]
        lines += [f"  {name:36} {reason}" for name, reason in sorted(self.failing.items())]
        return "\n".join(lines)


def sweep(infos: Iterable[Any], device: torch.device, n_samples: int) -> Sweep:
    """Check each operator of the database."""
    found = Sweep()
    for info in infos:
        try:
            n_compared = check_operator(info, device, n_samples)
        except Exception as error:
            first_line = str(error).strip().partition("\n")[0]
            found.failing[info.full_name] = f"{type(error).__name__}: {first_line[:120]}"
        else:
            (found.agreeing if n_compared else found.not_on_cpu).append(info.full_name)
    return found
