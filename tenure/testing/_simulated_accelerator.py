"""The block in which the simulated accelerator runs; there is one at a time.

The device is put into torch at the first block and stays there for the life of the process.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Concatenate, ParamSpec

import torch

from tenure._errors import SimulatorUsageError
from tenure._torch.python_backend import require_all, set_up

from ._simulator import Simulator
from ._torch_backend import (
    AUTOCAST_KEY,
    DEVICE_TYPE,
    name_of_privateuse1,
    register_kernels,
)

P = ParamSpec("P")

_running: list[Simulator] = []
_kept: list[Any] = []
_failures: list[Exception] = []
_UNFINISHED = (
    f"torch {torch.__version__} refused a part of the simulated accelerator, as the error above "
    "says. The other parts stay in torch until the process ends. Use a torch that this tenure is "
    "tested with (see constraints.txt), in a new process."
)


def _with_options_of(
    start: Callable[Concatenate[Simulator, P], Simulator],
) -> Callable[[Callable[..., Any]], Callable[P, AbstractContextManager[Simulator]]]:
    """Decorate a block with the options of `start`, which declares and checks them."""
    signature = inspect.signature(start)
    # All but self.
    options = list(signature.parameters.values())[1:]

    def decorate(block: Callable[..., Any]) -> Callable[P, AbstractContextManager[Simulator]]:
        annotation = AbstractContextManager[Simulator]

        @functools.wraps(block)
        def checked(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[Simulator]:
            # A wrong option fails here already, not only where the block is entered.
            signature.bind(None, *args, **kwargs)
            made: AbstractContextManager[Simulator] = block(*args, **kwargs)
            return made

        vars(checked)["__signature__"] = inspect.Signature(options, return_annotation=annotation)
        return checked

    return decorate


@_with_options_of(Simulator.__call__)
@contextlib.contextmanager
def simulated_accelerator(**options: Any) -> Iterator[Simulator]:
    """Run a block with an accelerator in Python, `sim:0`: exact memory, a virtual clock, no GPU.

    The first block makes `sim` a device of torch, by renaming torch's PrivateUse1 backend, for as
    long as the process lives; importing this changes nothing. Each block starts the device afresh.

    Args:
        **options: those of the `Simulator` itself, which, called, starts the device afresh within
            the block: `budget="64MiB"`, `rates=Rates(...)`, `fail_at=3`, ...

    Yields:
        The `Simulator`; its figures can still be read after the block.

    Raises:
        SimulatorUsageError: PrivateUse1 has another name in this process, or a block is open.
        RaceError: at the end of a block that raised nothing itself, if it had races that were not
            taken with `take_faults()`.

    Example:
        >>> import torch
        >>> from tenure.testing import simulated_accelerator
        >>> def largest_that_fits(n_rows, device):
        ...     while True:
        ...         try:
        ...             return len(torch.ones(n_rows, 1024, device=device))
        ...         except torch.OutOfMemoryError:
        ...             n_rows //= 2
        >>> with simulated_accelerator(budget="1MiB") as sim:
        ...     n_rows = largest_that_fits(1000, sim.device)
        >>> n_rows, sim.peak_bytes, sim.n_ooms
        (250, 1024000, 2)
    """
    if _running:
        raise SimulatorUsageError(
            "A simulated accelerator is running already, and a process has one. Within its block"
            " call what it gave to start it afresh: sim(budget=...)."
        )
    _install()
    simulator = Simulator()
    simulator(**options)
    _running.append(simulator)
    try:
        yield simulator
    except BaseException as error:
        _note_races(error, simulator)
        raise
    else:
        simulator.finish()
    finally:
        _running.clear()
        simulator.fail_at(None)
        simulator.fail_pinning(None)


def running_simulator(asker: str) -> Simulator:
    """Return the simulator of the open block.

    Raises:
        SimulatorUsageError: none is open; `asker` needs one.
    """
    if not _running:
        raise SimulatorUsageError(
            f"{asker} found no simulated accelerator that runs, and without one no allocation can"
            " be made to fail. Call it inside `with simulated_accelerator() as sim:`, and let the"
            " program use sim.device."
        )
    return _running[-1]


def _note_races(error: BaseException, simulator: Simulator) -> None:
    races = [fault for fault in simulator.faults if fault not in str(error)]
    if races:
        error.add_note("The simulated accelerator found races before this:\n" + "\n".join(races))


@functools.cache
def _install() -> None:
    """Make `sim:0` a device of this process; later calls do nothing.

    Raises:
        MissingTorchNameError: this torch lacks a name that it needs; nothing was changed.
        SimulatorUsageError: another package has named PrivateUse1 first, or torch refused a part
            of the device, now or at an earlier call.
    """
    if _failures:
        raise SimulatorUsageError(_UNFINISHED) from _failures[0]
    # Late: this is what changes torch, and to import the module must not.
    from ._interface import _accelerator, _backward, _device_module, _module_to, _storage_methods

    require_all()
    taken = name_of_privateuse1()
    if taken is not None:
        raise SimulatorUsageError(
            f"torch's PrivateUse1 backend is {taken!r} in this process already, and it can be named"
            f" only once. The simulated accelerator names it {DEVICE_TYPE!r} for the whole process:"
            f" run its tests in a process of their own, in which nothing sets up {taken!r}."
        )
    try:
        guard = _backward.SafeGuard()
        # Torch keeps bare pointers to both.
        _kept.extend([_device_module, guard])
        set_up(DEVICE_TYPE, backend_module=_device_module, device_guard=guard)
        _install_kernels()
        for module in (_accelerator, _backward, _module_to, _storage_methods):
            module.install()
    except Exception as error:
        _failures.append(error)
        raise SimulatorUsageError(_UNFINISHED) from error


def _install_kernels() -> None:
    # Each notes its kernels.
    from ._operators import _autocast, _composites, _tensors, _transfers  # noqa: F401
    from ._operators._fallback import run_on_host

    fallthrough = torch.library.fallthrough_kernel
    register_kernels({"PrivateUse1": run_on_host, AUTOCAST_KEY: fallthrough})
    _autocast.forget_casts_with_autocast()
