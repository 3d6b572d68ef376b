"""The end of a backward pass on the device: its error reaches the caller, its memory is let go.

While C++ unwinds from a hook that raised, it asks the device guard for its type. With a guard in
Python and the error still pending, that call fails inside a `noexcept` function and would end the
process. This guard takes the pending error out of the interpreter first, and `backward` raises it
once the pass has stopped.
"""

import ctypes
import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import repeat, starmap
from operator import itemgetter
from typing import Any

import torch
import torch.autograd

from tenure._torch.autograd import is_running_node
from tenure._torch.python_backend import DeviceGuard, DeviceType, needed, replace

from .._device._machine import machine
from .._device._streams import lent_to_autograd
from .._torch_backend import sim_device

# What `backward` and `grad` call.
_RUN = "torch.autograd._engine_run_backward"
_plain_run = needed(_RUN)
_taken: dict[int | None, None] = {}
"""The errors that the guard has taken, by identity and with a reference each, the oldest first."""


def _answer() -> Callable[[], Any]:
    """Return what takes the pending error, and answers with the device type.

    All that runs in it is written in C. From Python 3.12 on a garbage collection may come with any
    bytecode, and would take the error for one of its own.
    """
    fetch = ctypes.PYFUNCTYPE(ctypes.c_void_p)(("PyErr_GetRaisedException", ctypes.pythonapi))
    took = map(_taken.setdefault, starmap(fetch, repeat(())))
    return map(itemgetter(1), zip(took, repeat(DeviceType.PrivateUse1))).__next__


class _Callable:
    """A plain call that the interpreter checks: SystemError if an error was pending before it."""

    def __call__(self) -> None:
        return None


_check_pending = _Callable()


class SafeGuard(DeviceGuard):  # type: ignore[misc]
    """The device guard; its one question may come while an error is on its way."""

    if sys.version_info >= (3, 12):
        type_ = _answer()
    else:

        def type_(self) -> Any:
            """Return the device type; a pending error is kept for `backward`."""
            try:
                _check_pending()
            except SystemError as wrapped:
                if wrapped.__cause__ is not None:
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(wrapped.__cause__))
                    _taken.setdefault(id(wrapped.__cause__))
            return DeviceType.PrivateUse1


def _oldest_taken() -> BaseException:
    """Return what a failed pass finds without an error of its own, and forget it."""
    key = next(filter(None, _taken))
    del _taken[key]
    error = ctypes.cast(key, ctypes.py_object)
    try:
        return error.value  # type: ignore[no-any-return]  # it is an error
    finally:
        ctypes.pythonapi.Py_DecRef(error)


def install() -> None:
    """Let `backward` and `grad` raise what the guard has taken, and return when memory is exact."""
    # It is made now, so that no mode of a program sees it made.
    _empty_pass()
    replace(_RUN, _ending_well(_plain_run))


def _ending_well(run: Any) -> Any:
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        has_thread = _has_thread(run)
        try:
            with lent_to_autograd(), _on_a_thread_that_torch_has(has_thread):
                return run(*args, **kwargs)
        except SystemError:
            if not any(_taken):
                raise
        finally:
            if has_thread and not is_running_node():
                _wait_for_engine(run)
        raise _oldest_taken()

    return run_backward


def _on_a_thread_that_torch_has(has_thread: bool) -> AbstractContextManager[object]:
    """Context in which nodes of any device find a thread: with several devices, the caller's.

    Autograd keeps a thread for each device that the guard tells of; a Python guard tells of one.
    """
    if has_thread and len(machine.devices) == 1:
        return nullcontext()
    return torch.autograd.set_multithreading_enabled(False)


@functools.cache
def _has_thread(run: Any) -> bool:
    """Return whether autograd has a thread for the device.

    It starts its threads at the first backward pass of the process, and none later: if that was
    before the device was put into torch, nodes of the device find no queue.

    Source: ``Engine::start_device_threads`` of torch/csrc/autograd/engine.cpp.
    """
    try:
        # torch.compile disables it while it traces, and then no queue is looked for
        with torch.autograd.set_multithreading_enabled(True):
            _wait_for_engine(run)
    except RuntimeError as error:
        if "device_ready_queues_" not in str(error):
            raise
        return False
    return True


def _wait_for_engine(run: Any) -> None:
    """Wait until autograd's thread for the device has let go of the last node that it ran.

    It wakes the caller first, so the node's tensors would stay allocated for a moment more. The
    thread takes the next node, here one without any bytes, only when it is done with the last.
    """
    leaf, grad = _empty_pass()
    run((leaf,), (grad,), False, False, (leaf,), allow_unreachable=True, accumulate_grad=False)


@functools.cache
def _empty_pass() -> tuple[torch.Tensor, torch.Tensor]:
    leaf, grad = (torch.empty(0, device=sim_device()) for _ in range(2))
    return leaf.requires_grad_(), grad
