"""A limit on the memory that a block may hold, on whatever device, the CPU included.

One way to keep it on every device: counting what each operation makes. Where the allocator has a
fraction of its own, that is a net below, for what counting can't see.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ContextDecorator
from threading import get_ident
from types import TracebackType
from typing import Any, Literal, NoReturn, Self, TypeVar

import torch

from tenure._errors import AdaptiveUsageError
from tenure._text import format_bytes

from ._budget_checks import (
    check_new,
    check_not_capturing,
    check_open,
    check_plain_function,
    checked_device,
    checked_limit,
)
from ._counting import CountingMode
from ._fraction import FractionNet, keeps_fractions

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Status = Literal["not yet open", "open", "closed"]


class memory_budget(ContextDecorator):
    """A block, or with ``@memory_budget(...)`` a function, that can hold only so much memory.

    What counts are the bytes of the storages that were made since the block began and are alive,
    each once, whoever holds them; what was there before counts only by what it grows. An operation
    whose results don't fit raises ``torch.OutOfMemoryError``, and its results are gone.

    The operations of the thread that opened the block are counted, those of its backward passes
    included, and what paging takes there. The count is exact between operations: what one allocates
    and frees inside itself is not seen. Where the allocator has a memory fraction (CUDA, XPU), a
    looser net catches that, libraries, and other threads: see ``docs/adaptive.md``.

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

    def __init__(self, limit: int | str, device: str | torch.device = "cpu") -> None:
        self.limit_bytes = checked_limit(limit)
        self.device = checked_device(device)
        self._counting = CountingMode(self.limit_bytes, self.device)
        self._net: FractionNet | None = None
        self._status: _Status = "not yet open"
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
            AdaptiveUsageError: the budget was entered before, or a graph is being captured on its
                device.
        """
        check_new(self, self._status)
        check_not_capturing(self)
        if self.device.type != "cpu" and keeps_fractions(self.device):
            self._net = FractionNet(self.limit_bytes, self.device)
            self._net.open()
        self._counting.open()
        self._status = "open"
        self._thread_id = get_ident()
        return self

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
        check_open(self, self._status, self._thread_id)
        self._status = "closed"
        if self._net is not None:
            self._net.close()
        if not self._counting.close() and (exc is None or isinstance(exc, GeneratorExit)):
            raise AdaptiveUsageError(
                f"{self!r} ended before a budget, or another dispatch mode, that was opened inside "
                "it. It limits nothing any more. Close what was opened last first."
            )

    def __call__(self, func: _Function) -> _Function:
        """Run each call of ``func`` within a budget of its own.

        Raises:
            AdaptiveUsageError: it is no function, or gives a generator or a coroutine.
        """
        check_plain_function(func)
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
        return type(self)(self.limit_bytes, self.device)  # calls may overlap, on several threads
