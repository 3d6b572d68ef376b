"""The largest batch that fits, found before the work begins."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from tenure._devices import NO_ACCELERATOR, indexed
from tenure._errors import AdaptiveUsageError, OutOfRetriesError, TenureError
from tenure._host_memory import free_host_bytes
from tenure._oom import OomInfo
from tenure._show import steps
from tenure._text import format_bytes
from tenure._torch.compiler import never_compiled
from tenure.scopes import DisposeScope

from ._attempt import Attempts, OnRetry
from ._callables import check_function, name_of
from ._memory import MemoryMeter, memory_budget, meter_for
from ._ranks import call_of_ranks
from ._sizes import SizeLimits, SizeModel, SizeRange, checked_size
from ._step import FunctionState, no_optimizer_steps, refuse_capture
from ._undo import Caches

_ENTRY = "find_batch_size"
_MARGIN = 0.05
_ADVICE = (
    "Not even low=1 fits: free memory, make the model or the sample smaller, or page the model."
)


@never_compiled
def find_batch_size(
    fn: Callable[[int], object],
    *,
    low: int = 1,
    high: int,
    margin: float = _MARGIN,
    budget: int | str | None = None,
    align: int = 1,
    device: str | torch.device | None = None,
    on_retry: OnRetry | None = None,
    group: Any = None,
) -> int:
    """Run ``fn`` with some sizes, and return one that is at least 95 % of the largest that fits.

    The size has run itself, and at most three others ran out of memory. It may be half of the
    largest if memory goes up in large steps, such as a buffer that doubles, or if the allocator of
    the device reserves much more than tensors use. If memory can be measured, small sizes show how
    large the next may be; otherwise the size doubles until one fails. ``high`` is tried only if
    smaller sizes say that it may fit.

    Each run is undone: its tensors are freed, and random state, gradients and the buffers of the
    modules that ``fn`` reaches are restored. Neither ``fn`` nor an optimizer may move existing
    parameters. A new optimizer has no state yet: let another one of its kind, with ``lr=0``, step
    on gradients of zero before the search, and delete it afterwards.

    Args:
        fn: does the work with so many samples, such as forward and backward; its result is ignored.
        low: the smallest useful size.
        high: the largest.
        margin: the share of the memory that stays free, from 0 (none) to below 1, because memory
            varies from run to run, for example by fragmentation. If memory can't be measured, the
            size is smaller by this share.
        budget: the memory of a run, in bytes or like ``"6GiB"``, counted as by `memory_budget`:
            weights and optimizer state that exist are free. None: the free memory.
        align: sizes are multiples of it.
        device: the device whose memory counts; None: the device of the tensors that ``fn`` reaches,
            or else the current accelerator, or else the CPU.
        on_retry: called with each AdaptiveEvent.
        group: the process group whose ranks all make this call: they get the smallest of their
            sizes.

    Returns:
        A size that ran.

    Raises:
        OutOfRetriesError: ``low`` does not fit.
        RemoteRankError: of a ``group``: the search has failed on another rank.
        AdaptiveUsageError: an argument can't be used, a graph is being captured, an optimizer
            stepped, or ``fn`` writes a parameter.

    Example:
        >>> import torch
        >>> from tenure.adaptive import find_batch_size
        >>> model = torch.nn.Linear(256, 256)
        >>> def train(n_rows):
        ...     model(torch.ones(n_rows, 256)).square().mean().backward()
        >>> find_batch_size(train, high=1024, budget="16MiB", align=64)
        1024
        >>> model.weight.grad is None
        True
    """
    refuse_capture(_ENTRY)
    with ExitStack() as stack:
        name = name_of(fn)
        # first: what is refused here is an error on all ranks
        ranks = stack.enter_context(call_of_ranks(_ENTRY, name, fn, group))
        check_function(_ENTRY, fn)
        low, high = _checked_range(low, high, checked_size("align", align))
        margin = _checked_margin(margin)
        state = FunctionState(fn)
        writes = state.writes(_ENTRY, name)
        where = _device_of(device, state.devices)
        meter = _meter_of(where, budget, stack)
        show = stack.enter_context(steps(f"{_ENTRY}({name})"))
        finder = _Finder(SizeLimits(low, high, align), margin, meter)
        scope = stack.enter_context(DisposeScope(_ENTRY))
        attempts = Attempts(
            name,
            scope,
            unit="batch size",
            state=state,
            on_retry=on_retry,
            advice=_ADVICE,
            starts_empty=True,
        )

        def attempt(size: int) -> None:
            if size in finder.ran:
                return
            show(f"batch size {size}")
            caches = Caches(state.reached)
            # it empties the cache of the device, too, as a program finds it
            finder.restart()
            with (
                no_optimizer_steps(_ENTRY, state.parameters),
                state.watching(),
                writes.guarded(),
            ):
                fn(size)
            # the first run tells
            writes.check()
            finder.measure()
            attempts.take_back(caches)

        try:
            attempts.run(finder, attempt)
            while finder.go_on():
                attempts.run(finder, attempt)
        except Exception as error:
            if not isinstance(error, TenureError):
                error.add_note(
                    f"{_ENTRY}() ran {name!r} at batch size {finder.size}, between low={low} and "
                    f"high={high}. If it can't run at that size, give other limits."
                )
            raise
        finally:
            # an error holds this frame, and must not hold copies
            state.finish()
        if not finder.found:
            raise _too_large(name, finder, low, margin)
        return finder.found if ranks is None else ranks.smallest(finder.found)


class _Finder:
    """The sizes of one search for the largest that fits, as attempts use them.

    Args:
        limits: the sizes that are allowed.
        margin: the share of the memory, or of the size if that can't be measured, to be left.
        meter: measures what sizes need; None: nobody can.

    Attributes:
        size: the size to run now.
        ran: the sizes that have run.
        needed_bytes: what the last size that ran to its end needed.
        limit_bytes: the memory that a size may need; None: nobody can tell.
    """

    limited_by = "low= or align="

    def __init__(self, limits: SizeLimits, margin: float, meter: MemoryMeter | None) -> None:
        self._limits, self._margin = limits, margin
        self._sizes = SizeRange(limits.floor, limits.aligned(limits.maximum or 0), limits.align)
        self._model = SizeModel()
        self._n_ooms = 0
        self._meter = meter if meter is not None and meter.measures else None
        self.limit_bytes: int | None = None
        self.ran: set[int] = set()
        self.needed_bytes: int | None = None
        self.size = limits.floor

    @property
    def found(self) -> int:
        """The largest size that ran and leaves the margin; 0 if none does."""
        return max((size for size in self.ran if size <= self._largest), default=0)

    @property
    def _largest(self) -> int:
        ok, limits = self._model.ok, self._limits
        # a limit in bytes has the margin taken off
        if self._is_measured or not ok:
            return ok
        # above 2 ** 53 a float may be more
        return max(limits.floor, limits.aligned(min(ok, int(ok * (1 - self._margin)))))

    @property
    def _is_measured(self) -> bool:
        return self.limit_bytes is not None and self._model.needed_bytes is not None

    def restart(self) -> None:
        """Begin to measure what a size needs."""
        if self._meter is not None:
            self._meter.restart()
            self.limit_bytes = int(self._meter.available_bytes() * (1 - self._margin))

    def measure(self) -> None:
        """Note what the size needed, while what it made is still there."""
        self.needed_bytes = None if self._meter is None else self._meter.needed_bytes()

    def go_on(self) -> bool:
        """Choose the size to run next; False if the search is over."""
        size = self._next_size()
        if size is None and not self._is_measured:
            # the one that leaves the margin may not have run
            size = self._largest
        if not size or size in self.ran:
            return False
        self.size = size
        return True

    def _next_size(self) -> int | None:
        if not self._model.ok:
            return None
        return self._model.next_size(self._sizes, self.limit_bytes, self._n_ooms)

    # --- as attempts use it

    def succeeded(self) -> None:
        """Work of this size returned."""
        size, needed_bytes, model = self.size, self.needed_bytes, self._model
        if size in self.ran:
            return
        self.ran.add(size)
        if needed_bytes and self.limit_bytes is not None and needed_bytes > self.limit_bytes:
            model.ran_over(size, needed_bytes)
            return
        model.ran(size, needed_bytes)

    def shrink(self, info: OomInfo) -> bool:
        """Work of this size ran out of memory; False if no smaller one can be tried."""
        self._n_ooms += 1
        self._model.ran_out(self.size, self._limits.align)
        self.size = self._next_size() or self._model.ok
        return self.size > 0

    def gave_up(self) -> int:
        """Give up: no size fits, and no earlier call is known."""
        return 0


def _meter_of(
    device: torch.device, budget: int | str | None, stack: ExitStack
) -> MemoryMeter | None:
    """Return the meter of the work, within its budget until the stack is closed."""
    meter = meter_for(str(device))
    if budget is not None:
        stack.enter_context(memory_budget(budget, device))
    elif device.type == "cpu" and (meter is None or not meter.measures):
        # the host tells what is free; what is made has to be counted
        stack.enter_context(memory_budget(max(1, free_host_bytes())))
    else:
        return meter
    return meter_for(str(device))


def _device_of(device: Any, reached: list[torch.device]) -> torch.device:
    """Return the device whose memory is meant."""
    if device is not None:
        try:
            return indexed(device)
        except (RuntimeError, AssertionError, TypeError) as error:
            reason = str(error).partition("\n")[0]
            raise AdaptiveUsageError(
                f"{_ENTRY}() got device={device!r}: {reason}. Name a device that tensors can be "
                'made on, such as "cpu" or "cuda:0".'
            ) from error
    found = [each for each in reached if each.type not in NO_ACCELERATOR]
    if found:
        return found[0]
    current = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if reached or current is None else indexed(current)


def _checked_range(low: int, high: int, align: int) -> tuple[int, int]:
    low, high = checked_size("low", low), checked_size("high", high)
    if high // align * align < -(-low // align) * align:
        aligned = "" if align == 1 else f", in multiples of align={align}"
        raise AdaptiveUsageError(
            f"{_ENTRY}() got low={low} and high={high}, between which there is no size{aligned}. "
            "Raise high, or lower low."
        )
    return low, high


def _checked_margin(margin: float) -> float:
    try:
        share = float(margin)
    except (TypeError, ValueError):
        share = -1.0
    if not 0 <= share < 1 or isinstance(margin, bool):
        raise AdaptiveUsageError(
            f"{_ENTRY}() got margin={margin!r}. Give the share of the memory that is to be left, "
            "from 0 to below 1."
        )
    return share


def _too_large(name: str, finder: _Finder, low: int, margin: float) -> OutOfRetriesError:
    """Return the error where the smallest size ran, and needs more than it may."""
    needed_bytes, limit_bytes = finder.needed_bytes or 0, finder.limit_bytes or 0
    return OutOfRetriesError(
        f"{name!r} ran at batch size {finder.size}, the smallest that low={low} allows, and needed "
        f"{format_bytes(needed_bytes)}, of {format_bytes(limit_bytes)} that margin={margin:g} "
        "leaves of the memory. Give a smaller low= or margin=, or free memory.",
        (finder.size,),
    )
