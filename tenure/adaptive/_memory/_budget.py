"""Limits on memory: on what a block holds, on whatever device, and on what a process takes.

The limit of a block is kept on every device, the CPU included, by counting what each operation
makes. What is refused is refused before anything changes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ContextDecorator
from threading import current_thread, get_ident
from types import TracebackType
from typing import Any, Literal, NoReturn, Self, TypeVar

import torch

from tenure._callers import warn_user
from tenure._devices import indexed
from tenure._errors import AdaptiveUsageError, AdaptiveUsageWarning
from tenure._graph_capture import is_capturing
from tenure._host_memory import address_space_bytes, has_address_space_limits, limit_address_space
from tenure._text import format_bytes, parse_bytes
from tenure._torch.fakes import are_made

from .._callables import is_suspendable, name_of
from .._interrupts import Interrupts
from ._counting import CountingMode

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Status = Literal["not yet open", "open", "closed"]
_ONE_BLOCK = "A budget is neither reusable nor reentrant: make a new one with memory_budget()."
_WITHOUT_MEMORY = ("meta",)
_GIB = 1 << 30


class memory_budget(ContextDecorator):
    """A block, or with ``@memory_budget(...)`` a function, that can hold only so much memory.

    What counts are the bytes of the storages that were made since the block began and are alive,
    each once, whoever holds them; what was there before counts only by what it grows. An operation
    whose results don't fit raises ``torch.OutOfMemoryError``, and its results are gone. It has run:
    its writes in place stay, and random generators have moved on.

    The operations of the thread that opened the block are counted, those of its backward passes
    included, and what paging takes there. The count is exact between operations: what one allocates
    and frees inside itself is not seen, and neither are other threads.

    Args:
        limit: bytes, as an int or like ``"64MiB"``.
        device: the device whose memory is limited.

    Attributes:
        limit_bytes: the limit.
        device: the device, with its index.

    Raises:
        ByteSizeError: the limit is no number of bytes.
        AdaptiveUsageError: the limit is zero, or the device isn't there or has no memory.

    Example:
        >>> import torch
        >>> from tenure.adaptive import memory_budget
        >>> with memory_budget("1KiB") as budget:
        ...     x = torch.zeros(128)
        ...     try:
        ...         x.repeat(2)
        ...     except torch.OutOfMemoryError as error:
        ...         print(str(error).partition(" in ")[0])
        cpu out of memory. Tried to allocate 1.0 KiB (1024 bytes)
        >>> budget
        <memory_budget 1.0 KiB on cpu, closed, 512 B live, 512 B peak>
    """

    _status: _Status = "not yet open"

    def __init__(self, limit: int | str, device: str | torch.device = "cpu") -> None:
        self.limit_bytes = parse_bytes(limit)
        if self.limit_bytes == 0:
            raise AdaptiveUsageError(
                "memory_budget() got a limit of 0 bytes, in which nothing fits. Give at least 1 "
                "byte."
            )
        self.device = _checked_device(device)
        self._counting = CountingMode(self.limit_bytes, self.device)
        self._thread_id = 0

    @property
    def live_bytes(self) -> int:
        """The bytes that count now; once the block has ended, those that counted at its end."""
        return self._counting.live_bytes

    @property
    def peak_bytes(self) -> int:
        """The most bytes that counted at once; a refused operation's results are not among them."""
        return self._counting.peak_bytes

    def __enter__(self) -> Self:
        """Begin to limit what this thread makes.

        Raises:
            AdaptiveUsageError: the budget was entered before, a graph is being captured on its
                device, or tensors have no data, as in a prediction.
        """
        if self._status != "not yet open":
            raise AdaptiveUsageError(f"{self!r} was entered a second time. {_ONE_BLOCK}")
        if is_capturing(self.device):
            raise AdaptiveUsageError(
                f"{self!r} was entered while a graph is being captured on {self.device}, whose "
                "replays make nothing that it could count. Open it around the capture."
            )
        if are_made():
            raise AdaptiveUsageError(
                f"{self!r} was entered by work that runs on tensors without data, as "
                "predict_peak() and plan() run it: they have no bytes to count. Open it around "
                "what runs the work, and predict the work without it."
            )
        # no __exit__ follows an interrupt in here
        try:
            with Interrupts():
                self._counting.open()
                self._status, self._thread_id = "open", get_ident()
            return self
        except BaseException:
            self._close()
            raise

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the limit; an exception of the block goes on unmasked.

        Raises:
            AdaptiveUsageError: on another thread, or when it isn't open, and nothing changes; or
                before a mode that was opened inside, and the budget is closed.
        """
        try:
            if self._status != "open":
                raise AdaptiveUsageError(f"{self!r} was closed, but it is not open. {_ONE_BLOCK}")
            if self._thread_id != get_ident():
                raise AdaptiveUsageError(
                    f"{self!r} was closed from thread {current_thread().name!r}, and stays open. "
                    "A budget belongs to the thread that opened it: close it there."
                )
            in_order = self._close()
        except KeyboardInterrupt:
            self._close()
            raise
        if not in_order and (exc is None or isinstance(exc, GeneratorExit)):
            raise AdaptiveUsageError(
                f"{self!r} ended before a budget, or another dispatch mode, that was opened inside "
                "it. It limits nothing any more. Close what was opened last first."
            )

    def _close(self) -> bool:
        """End it, as far as it was opened; False if a mode that was opened later is still open."""
        with Interrupts():
            self._status = "closed"
            return self._counting.close()

    def __del__(self) -> None:
        # Ctrl-C came as __exit__ began, or nobody kept what was entered by hand
        if self._status == "open" and not sys.is_finalizing():
            self._close()
            warn_user(
                f"{self!r} is no longer held by anything, and limits nothing any more. Keep it, or "
                "use a with statement.",
                AdaptiveUsageWarning,
            )

    def __call__(self, func: _Function) -> _Function:
        """Run each call of ``func`` within a budget of its own.

        Raises:
            AdaptiveUsageError: it is no function, or gives a generator or a coroutine.
        """
        if not callable(func):
            raise AdaptiveUsageError(f"@memory_budget() wants a function, and got {func!r}.")
        if is_suspendable(func):
            raise AdaptiveUsageError(
                f"@memory_budget() got {name_of(func)}(), which can be suspended while what it "
                "makes lives on. Open a budget in the function that runs it."
            )
        return super().__call__(func)

    def __repr__(self) -> str:
        text = f"memory_budget {format_bytes(self.limit_bytes)} on {self.device}, {self._status}"
        if self._status == "not yet open":
            return f"<{text}>"
        live, peak = format_bytes(self.live_bytes), format_bytes(self.peak_bytes)
        return f"<{text}, {live} live, {peak} peak>"

    def __reduce__(self) -> NoReturn:
        raise AdaptiveUsageError(
            f"{self!r} can't be copied or pickled: it belongs to one block. Make a new one."
        )

    def _recreate_cm(self) -> Self:
        # calls may overlap, on several threads
        return type(self)(self.limit_bytes, self.device)


def _checked_device(device: str | torch.device) -> torch.device:
    """Return a device that is there, with the index it has on its storages.

    Raises:
        AdaptiveUsageError: torch doesn't know it, it isn't there, or it has no memory.
    """
    try:
        if not isinstance(device, str | torch.device):
            raise TypeError(f"a device is a str or a torch.device, not a {type(device).__name__}")
        found = torch.device(device)
        # No tensor is on "cpu:0": torch drops that index, and would find the two devices unequal.
        if found.type == "cpu":
            return torch.device("cpu")
        return _checked_accelerator(found)
    except (RuntimeError, TypeError) as error:
        # CUDA's errors go on with lines of advice on how to debug kernels.
        reason = str(error).partition("\n")[0]
        raise AdaptiveUsageError(
            f"memory_budget() can't limit device={device!r}: {reason}. Name a device that "
            'tensors can be made on, such as "cpu" or "cuda:0".'
        ) from error


def _checked_accelerator(device: torch.device) -> torch.device:
    if device.type in _WITHOUT_MEMORY:
        raise RuntimeError("its tensors have no memory")
    module = torch.get_device_module(device)
    if not module.is_available():
        raise RuntimeError("this machine, or this build of torch, has none")
    found = indexed(device)
    if found.index >= module.device_count():
        raise RuntimeError(f"this machine has {module.device_count()} of its type")
    return found


def set_cpu_memory_limit(gigabytes: float) -> None:
    """Limit the memory of this process, so that the CPU runs out of it and does not begin to swap.

    What is limited is the address space (``RLIMIT_AS``), which is larger than the memory in use:
    torch alone takes over 0.6 GiB of it, and a process that has CUDA open far more. A process can
    lower its limit, but never raise it again.

    Args:
        gigabytes: GiB of address space, such as ``8`` or ``0.5``; a limit that is stricter already
            stays.

    Raises:
        AdaptiveUsageError: it is no positive number, the process uses more already, or the system
            has no such limit, as Windows.

    Source: ``toma.cpu_memory.set_cpu_memory_limit``.
    """
    n_bytes = _checked_bytes(gigabytes)
    if not has_address_space_limits():
        raise AdaptiveUsageError(
            "set_cpu_memory_limit() can't limit this process: the system has no RLIMIT_AS. "
            "memory_budget() limits what a block holds, on any system."
        )
    used_bytes = address_space_bytes()
    if n_bytes < used_bytes:
        raise AdaptiveUsageError(
            f"set_cpu_memory_limit({gigabytes}) is less than this process uses already: "
            f"{used_bytes / _GIB:.2f} GiB of address space. Nothing was changed. Allow more."
        )
    limit_address_space(n_bytes)


def _checked_bytes(gigabytes: float) -> int:
    is_number = isinstance(gigabytes, int | float) and not isinstance(gigabytes, bool)
    if not is_number or not 0 < gigabytes < 1 << 30:
        raise AdaptiveUsageError(
            f"set_cpu_memory_limit() got {gigabytes!r}, which is no number of GiB. Give one, such "
            "as 8 or 0.5."
        )
    return int(gigabytes * _GIB)
