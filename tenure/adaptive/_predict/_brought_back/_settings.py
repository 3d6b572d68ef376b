"""Settings of torch that work may change and leave so: as before when a prediction ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def settings_kept() -> Iterator[None]:
    """Return a block after which these are as they were.

    Default device and type, whether gradients are recorded, anomaly detection, deterministic
    algorithms, and autocast of the CPU, of CUDA and of the accelerator of this machine.
    """
    before = _settings()
    try:
        yield
    finally:
        after = _settings()
        # only what differs: setting the default device makes a mode of it
        for name, (value, put_back) in before.items():
            if after[name][0] != value:
                put_back(value)


def _settings() -> dict[str, tuple[Any, Callable[[Any], object]]]:
    """Return the settings by name, each with what sets it."""
    found: dict[str, tuple[Any, Callable[[Any], object]]] = {
        "device": (torch.get_default_device(), _set_device),
        "dtype": (torch.get_default_dtype(), torch.set_default_dtype),
        "gradients": (torch.is_grad_enabled(), torch.set_grad_enabled),
        "anomaly": (
            (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            lambda value: torch.autograd.set_detect_anomaly(*value),
        ),
        "deterministic": (
            (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
        ),
    }
    accelerator = torch.accelerator.current_accelerator()
    kinds = {"cpu", "cuda", *([] if accelerator is None else [accelerator.type])}
    for kind in sorted(kinds):
        found[f"autocast {kind}"] = (
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)),
            _set_autocast,
        )
    return found


def _set_device(device: torch.device) -> None:
    # that of the host is the default without any
    torch.set_default_device(None if device == torch.device("cpu") else device)


def _set_autocast(value: tuple[str, bool, torch.dtype]) -> None:
    kind, is_enabled, dtype = value
    torch.set_autocast_enabled(kind, is_enabled)
    torch.set_autocast_dtype(kind, dtype)
