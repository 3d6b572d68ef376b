"""The order in which the device is put into torch, once per process and for its whole life."""

import functools
from typing import Any

from tenure._errors import SimulatorUsageError

from .._torch_backend import DEVICE_TYPE, name_of_privateuse1, register_device


@functools.cache
def install() -> None:
    """Make `sim:0` a device of this process; later calls do nothing.

    Raises:
        SimulatorUsageError: another package has named PrivateUse1 first.
    """
    taken = name_of_privateuse1()
    if taken is not None:
        raise SimulatorUsageError(
            f"torch's PrivateUse1 backend is {taken!r} in this process already, and it can be named"
            f" only once. The simulated accelerator names it {DEVICE_TYPE!r} for the whole process:"
            f" run its tests in a process of their own, in which nothing sets up {taken!r}."
        )
    from . import _backward, _device_module

    # Torch keeps bare pointers to both.
    _kept.extend([_device_module, _backward.SafeGuard()])
    register_device(*_kept)
    _install_kernels()
    _install_patches()


def _install_kernels() -> None:
    from .._dispatch import register, register_fallback
    from .._operators import _autocast, _composites, _tensors, _transfers
    from .._operators._fallback import WHOLE_KERNELS, run_on_host

    register_fallback(run_on_host, "PrivateUse1")
    register(_tensors.kernels() | _transfers.DEVICE_KERNELS)
    register(_composites.KERNELS | WHOLE_KERNELS)
    register(_transfers.HOST_KERNELS, "CPU")
    for key in _transfers.LAZY_KEYS:
        register(_transfers.LAZY_KERNELS, key)
    _autocast.install()


def _install_patches() -> None:
    from . import _accelerator, _backward, _module_to, _storage_methods

    for module in (_accelerator, _backward, _module_to, _storage_methods):
        module.install()


_kept: list[Any] = []
