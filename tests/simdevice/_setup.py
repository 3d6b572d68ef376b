"""The order in which the device is put into torch, once per process and for its whole life."""

import functools
from typing import Any

from ._torch_backend import register_device


@functools.cache
def install() -> None:
    """Make `sim:0` a device of this process; later calls do nothing."""
    from . import _backward, _device_module

    # Torch keeps bare pointers to both.
    _kept.extend([_device_module, _backward.SafeGuard()])
    register_device(*_kept)
    _install_kernels()
    _install_patches()


def _install_kernels() -> None:
    from . import _autocast, _composites, _tensors, _transfers
    from ._dispatch import register, register_fallback
    from ._fallback import WHOLE_KERNELS, run_on_host

    register_fallback(run_on_host, "PrivateUse1")
    register(_tensors.kernels() | _transfers.DEVICE_KERNELS)
    register(_composites.KERNELS | WHOLE_KERNELS)
    register(_transfers.HOST_KERNELS, "CPU")
    for key in _transfers.LAZY_KEYS:
        register(_transfers.LAZY_KERNELS, key)
    _autocast.install()


def _install_patches() -> None:
    from . import _accelerator, _backward, _parameter_data, _storage_methods

    for module in (_accelerator, _backward, _parameter_data, _storage_methods):
        module.install()


_kept: list[Any] = []
