"""The handle that a test holds: start the device afresh, plant failures, read what happened.

Figures come from the machine as it is at that moment; nothing here keeps state of its own.
"""

import contextlib
from typing import Any, get_args

import torch

from ._clock import Engine
from ._machine import Settings, machine
from ._pinned import pinned_memory
from ._races import RaceError
from ._rates import Rates
from ._streams import default_stream, set_stream
from ._torch_backend import sim_device
from ._units import parse_bytes


class Simulator:
    """The simulated accelerator of this process; what the fixture `sim` gives a test."""

    def __call__(
        self,
        *,
        budget: int | str | None = None,
        link: Rates | None = None,
        fail_at: int | None = None,
        round_to_bytes: int = 1,
        detect_races: bool = True,
    ) -> "Simulator":
        """Start the device afresh: nothing allocated or registered, virtual time zero.

        Tensors from before keep working, but they count for the budget no longer.

        Args:
            budget: the most bytes that may be active, as an int or like `"64MiB"`.
            link: speeds of the link and of the device.
            fail_at: the number of the allocation, from 1, that fails once.
            round_to_bytes: each allocation counts as a multiple of this; CUDA's is 512.
            detect_races: False saves the time that checking takes.
        """
        machine.start(
            Settings(
                budget_bytes=None if budget is None else parse_bytes(budget),
                round_to_bytes=round_to_bytes,
                rates=link or Rates(),
                detect_races=detect_races,
            )
        )
        pinned_memory.start()
        set_stream(default_stream())
        self.fail_at(fail_at)
        return self

    @property
    def device(self) -> torch.device:
        """`sim:0`."""
        return sim_device()

    @property
    def module(self) -> Any:
        """The device module, as `torch.get_device_module(sim.device)`."""
        return torch.get_device_module(self.device)

    @property
    def budget_bytes(self) -> int | None:
        """The most bytes that may be active; may be set at any time."""
        return machine.pool.budget_bytes

    @budget_bytes.setter
    def budget_bytes(self, size: int | str | None) -> None:
        machine.pool.budget_bytes = None if size is None else parse_bytes(size)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the live tensors."""
        return machine.pool.allocated_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that was allocated since the start or the last `reset_peak`."""
        return machine.pool.peak_bytes

    @property
    def allocation_count(self) -> int:
        """How many allocations succeeded since the start."""
        return machine.pool.allocation_count

    @property
    def oom_count(self) -> int:
        """How many allocations failed since the start."""
        return machine.pool.oom_count

    @property
    def failure_is_planted(self) -> bool:
        """Whether a failure from `fail_at` has still to happen."""
        return machine.pool.failure_is_planted

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
        """The races found so far; the fixture fails the test if any are left at its end."""
        return list(machine.detector.faults)

    def busy_s(self, engine: Engine) -> float:
        """Virtual seconds that an engine, `"h2d"`, `"d2h"` or `"compute"`, has worked."""
        return machine.clock.busy_s[_known(engine)]

    def copied_bytes(self, engine: Engine) -> int:
        """Bytes that went over the link in one direction, `"h2d"` or `"d2h"`."""
        return machine.clock.copied_bytes[_known(engine)]

    def launches(self, engine: Engine) -> int:
        """How many pieces of work an engine was given."""
        return machine.clock.launches[_known(engine)]

    def fail_at(self, number: int | None) -> None:
        """Make the `number`-th allocation from now fail, once; None takes that back."""
        machine.pool.fail_at(number)

    def reset_peak(self) -> None:
        """Start the peak from what is allocated now."""
        machine.pool.reset_peaks()

    def take_faults(self) -> list[str]:
        """The races found so far, which then no longer fail the test."""
        taken, machine.detector.faults = machine.detector.faults, []
        return taken

    def finish(self) -> None:
        """End the program: every copy must find its host memory as it was launched.

        Raises:
            RaceError: a race was found and not taken with `take_faults`.
        """
        with contextlib.suppress(RaceError):
            machine.host_copies.settle_all()  # what it finds is among the faults
        if machine.detector.faults:
            raise RaceError("\n".join(self.take_faults()))


def _known(engine: Engine) -> Engine:
    if engine not in get_args(Engine):
        raise ValueError(f"there is no engine {engine!r}; the engines are {get_args(Engine)}.")
    return engine
