"""The handle that a test holds: start the devices afresh, plant failures, read what happened.

Figures come from the machine as it is at that moment; a handle knows only its device's index.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, get_args

import torch

from tenure._errors import RaceError
from tenure._text import parse_bytes

from ._allocator import MemoryPool, check_number
from ._device._blocks import span_of
from ._device._clock import Engine, Rates
from ._device._host_memory import check_failure, pinned_memory
from ._device._machine import Allocator, Settings, machine
from ._device._streams import current_stream, forget_choices
from ._device._which import index_of
from ._interface._module_to import install_current_index
from ._torch_backend import sim_device


class Simulator:
    """The simulated accelerator of this process, as `simulated_accelerator` gives it.

    Args:
        index: of the device whose figures this handle reads; see `on`.

    Any other attribute than these and the properties is refused when it is set.

    Attributes:
        default_allocator: what a start takes that names no allocator.

    Example:
        >>> import torch
        >>> from tenure.testing import simulated_accelerator
        >>> with simulated_accelerator(allocator="exact") as sim:
        ...     x = torch.ones(256, device=sim.device)
        ...     print(sim.device, sim.allocated_bytes, (x + 1).sum().item(), sim.peak_bytes)
        ...     sim = sim(budget="1KiB")  # afresh: x counts no more
        ...     print(sim.allocated_bytes, sim.budget_bytes)
        sim:0 1024 512.0 2052
        0 1024
    """

    # A misspelt `sim.budget = ...` must not pass for a setting
    __slots__ = ("_index", "default_allocator")

    def __init__(self, index: int = 0) -> None:
        self._index = index
        self.default_allocator: Allocator = "exact"

    def __call__(
        self,
        *,
        devices: int = 1,
        allocator: Allocator | None = None,
        budget: int | str | None = None,
        rates: Rates | None = None,
        fail_at: int | None = None,
        round_to_bytes: int = 1,
        detect_races: bool = True,
        fail_pinning: int | str | None = None,
    ) -> "Simulator":
        """Start the devices afresh: nothing allocated or registered, virtual time zero.

        Tensors from before keep working, but they count for the budget no longer.

        Args:
            devices: how many there are, `sim:0`, `sim:1` and so on, each with a memory, streams,
                engines and random numbers of its own.
            allocator: `"exact"` accounts each allocation for itself; `"cuda"` keeps the rules of
                CUDA's caching allocator, in segments of 2 and 20 MiB; None takes
                `default_allocator`.
            budget: the memory of each device, as an int or like `"64MiB"`. It bounds the bytes
                that are active, or with `"cuda"` those that are reserved.
            rates: speeds of the link and of the device.
            fail_at: the number of the allocation, from 1, that fails once.
            round_to_bytes: each allocation counts as a multiple of this, with `"exact"`; with
                `"cuda"` it is 512 always, and another number is refused.
            detect_races: False saves the time that checking takes.
            fail_pinning: which host memory can't be pinned; see the method of this name.

        Raises:
            ValueError: an option has a value that means nothing; the device stays as it was.
        """
        settings = Settings(
            devices=devices,
            allocator=_known(allocator or self.default_allocator, Allocator, "allocator"),
            budget_bytes=None if budget is None else parse_bytes(budget),
            round_to_bytes=round_to_bytes,
            rates=Rates() if rates is None else rates,
            detect_races=detect_races,
        )
        check_number(fail_at)
        check_failure(fail_pinning)
        if devices > 1:
            install_current_index()
        machine.start(settings)
        pinned_memory.start()
        forget_choices()
        self.fail_at(fail_at)
        self.fail_pinning(fail_pinning)
        return self

    def on(self, index: int) -> "Simulator":
        """Return the handle of another device: its figures, its budget, its failures."""
        return Simulator(index_of(index))

    @property
    def contexts(self) -> set[int]:
        """The indexes of the devices on which a context was created since the start."""
        return machine.contexts

    @property
    def device(self) -> torch.device:
        """The device of which this handle tells."""
        return sim_device(self._index)

    @property
    def module(self) -> Any:
        """The device module, as `torch.get_device_module(sim.device)`."""
        return torch.get_device_module(self.device)

    @property
    def allocator(self) -> Allocator:
        """The one that the devices were started with."""
        return machine.settings.allocator

    @property
    def budget_bytes(self) -> int | None:
        """The memory of the device; may be set at any time, when the cache is given back first."""
        return self._pool.budget_bytes

    @budget_bytes.setter
    def budget_bytes(self, size: int | str | None) -> None:
        # Or what is cached of the old budget would serve beyond the new one
        self._pool.empty_cache(machine.clock.host_s)
        self._pool.budget_bytes = None if size is None else parse_bytes(size)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the live tensors."""
        return self._pool.allocated_bytes

    @property
    def requested_bytes(self) -> int:
        """What those asked for; the allocator rounds it up."""
        return self._pool.counters["requested_bytes"].current

    @property
    def reserved_bytes(self) -> int:
        """What the allocator holds of the device's memory; those that are active where exact."""
        return self._pool.reserved_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that was allocated since the start or the last `reset_peak`."""
        return self._pool.peak_bytes

    @property
    def n_allocations(self) -> int:
        """How many allocations succeeded since the start."""
        return self._pool.counters["allocation"].allocated

    @property
    def n_ooms(self) -> int:
        """How many allocations failed since the start."""
        return self._pool.n_ooms

    @property
    def failure_is_planted(self) -> bool:
        """Whether a failure from `fail_at` has still to happen."""
        return self._pool.failure_is_planted

    @property
    def rates(self) -> Rates:
        """The speeds that the virtual clock runs on."""
        return machine.clock.rates

    @property
    def elapsed_s(self) -> float:
        """Virtual seconds until the host and all launched work are done."""
        return machine.clock.finished_s()

    @property
    def host_waits(self) -> int:
        """How often the host has stopped for the device."""
        return machine.clock.host_waits

    @property
    def faults(self) -> list[str]:
        """The races found so far; the block raises if any are left at its end."""
        return list(machine.detector.faults)

    def busy_s(self, engine: Engine) -> float:
        """Virtual seconds that an engine, `"h2d"`, `"d2h"` or `"compute"`, has worked."""
        return machine.clock.busy_s[self._index, _known(engine, Engine, "engine")]

    def copied_bytes(self, engine: Engine) -> int:
        """Return the bytes that went over the link in one direction, `"h2d"` or `"d2h"`."""
        return machine.clock.copied_bytes[self._index, _known(engine, Engine, "engine")]

    def launches(self, engine: Engine) -> int:
        """Return how many pieces of work an engine was given."""
        return machine.clock.launches[self._index, _known(engine, Engine, "engine")]

    def launch_kernel(
        self,
        duration_s: float,
        *,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
    ) -> None:
        """Put a kernel on this device's current stream that takes its time and computes nothing.

        Args:
            duration_s: virtual seconds that it takes; `host_launch_s` of the rates comes on top.
            reads: tensors on the device, of any shape and dtype, that it reads.
            writes: those that it writes, likewise; their bytes stay as they are.

        Raises:
            RaceError: a tensor was touched on another stream, and no wait orders the two.
        """
        if not duration_s >= 0:
            raise ValueError(f"launch_kernel({duration_s}): a kernel takes 0 seconds or more.")
        stream = current_stream(self._index)
        read, written = [span_of(x) for x in reads], [span_of(x) for x in writes]
        machine.launch("a kernel of launch_kernel()", stream, read, written)
        machine.clock.launch_timed(stream, duration_s)

    def fail_at(self, number: int | None) -> None:
        """Make the `number`-th allocation from now fail, once; None takes that back."""
        self._pool.fail_at(number)

    def fail_pinning(self, when: int | str | None) -> None:
        """Make host memory fail to be pinned from now on, by `pin_memory` and `cudaHostRegister`.

        As on CUDA, the failed call of `cudaHostRegister` leaves its error to the next launch.

        Args:
            when: the number, from 1, of what fails once; `"all"`; the most bytes that may be pinned
                at a time, as `"64KiB"`; None lets all succeed again.
        """
        pinned_memory.fail(when)

    def reset_peak(self) -> None:
        """Start the peak from what is allocated now."""
        self._pool.reset_peaks()

    def take_faults(self) -> list[str]:
        """Return the races found so far, which the end of the block then no longer raises."""
        taken, machine.detector.faults = machine.detector.faults, []
        return taken

    def finish(self) -> None:
        """End the program: every copy must find its host memory as it was launched.

        Raises:
            RaceError: a race was found and not taken with `take_faults`.
        """
        with contextlib.suppress(RaceError):
            # What it finds is among the faults.
            machine.host_copies.settle(None)
        if machine.detector.faults:
            raise RaceError("\n".join(self.take_faults()))

    @property
    def _pool(self) -> MemoryPool:
        return machine.devices[self._index].pool


def _known(name: Any, kinds: Any, what: str) -> Any:
    if name not in get_args(kinds):
        raise ValueError(f"there is no {what} {name!r}; there are {get_args(kinds)}.")
    return name
