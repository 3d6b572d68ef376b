"""Errors of Python hooks inside a backward pass on the device, which would end the process.

While C++ unwinds from a hook that raised, it asks the device guard for its type. With a guard in
Python and the error still pending, that call fails inside a `noexcept` function. This guard takes
the pending error out of the interpreter first, and `backward` raises it once the pass has stopped.
"""

from typing import Any

import torch
import torch.autograd
from torch._C._acc import DeviceGuard
from torch._C._autograd import DeviceType

_taken: list[BaseException] = []


class _Callable:
    """A plain call that the interpreter checks: SystemError if an error was pending before it."""

    def __call__(self) -> None:
        return None


_check_pending = _Callable()


class SafeGuard(DeviceGuard):
    """The device guard; its one question may come while an error is on its way."""

    def type_(self) -> Any:
        """The device type; a pending error is kept for `backward`."""
        try:
            _check_pending()
        except SystemError as wrapped:
            if wrapped.__cause__ is not None:
                _taken.append(wrapped.__cause__)
        return DeviceType.PrivateUse1


def install() -> None:
    """Let `backward` and `grad` raise what the guard has taken."""
    torch.autograd._engine_run_backward = _raising(torch.autograd._engine_run_backward)


def _raising(run: Any) -> Any:
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except BaseException:
            if not _taken:
                raise
        raise _take()

    return run_backward


def _take() -> BaseException:
    error = _taken[0]
    _taken.clear()
    return error
