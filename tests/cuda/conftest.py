"""The device that a check runs on: a real GPU, and for the rehearsal the simulated one.

Every check runs on both: as `[cuda]`, marked `cuda`, and as `[sim]`, marked `simdevice`, which
shows on any machine that the check itself runs. What only a GPU has is left out by name.
"""

import contextlib
import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


@dataclass
class Rig:
    """A device under check.

    Attributes:
        device: `cuda:0` or `sim:0`.
        sim: the simulator; None on a GPU.
    """

    device: torch.device
    sim: Any = None

    @property
    def module(self) -> Any:
        return torch.get_device_module(self.device)

    def bytes(self, n_bytes: int, index: int = 0) -> torch.Tensor:
        """uint8[n_bytes] on the device of that index."""
        return torch.empty(n_bytes, dtype=torch.uint8, device=self.at(index))

    def at(self, index: int) -> torch.device:
        return torch.device(self.device.type, index)

    def reserved_bytes(self) -> int:
        return self.module.memory_reserved(self.device)

    def needs_a_gpu(self, reason: str) -> None:
        """Leave the check out of the rehearsal."""
        if self.sim is not None:
            pytest.skip(f"can't be rehearsed: {reason}")

    def needs_two(self) -> None:
        if self.module.device_count() < 2:
            pytest.skip("needs two devices")

    @contextlib.contextmanager
    def limited(self, n_bytes: int) -> Iterator[None]:
        """A block in which the allocator may reserve so much more than what is in use now."""
        self.tidy()
        total_bytes = self.module.get_device_properties(self.device).total_memory
        before = self.module.get_per_process_memory_fraction(self.device)
        allowed_bytes = self.reserved_bytes() + n_bytes
        self.module.set_per_process_memory_fraction(allowed_bytes / total_bytes, self.device)
        try:
            yield
        finally:
            self.module.set_per_process_memory_fraction(before, self.device)

    def tidy(self) -> None:
        """Let go of what earlier checks left, in the cache too."""
        gc.collect()
        self.module.synchronize(self.device)
        self.module.empty_cache()

    def run(self, program: str, **environment: str) -> Any:
        """What a function of `programs.py` returns in a process of its own."""
        command = [sys.executable, "-m", "tests.cuda.programs", program, self.device.type]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])


_ON = [
    pytest.param("cuda", marks=pytest.mark.cuda),
    pytest.param("sim", marks=pytest.mark.simdevice),
]


@pytest.fixture(params=_ON)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """The device of a check, with nothing cached."""
    if request.param == "sim":
        from tenure.testing import simulated_accelerator

        with simulated_accelerator(allocator="cuda", devices=2) as sim:
            yield Rig(sim.device, sim)
    else:
        made = Rig(torch.device("cuda", 0))
        made.tidy()
        yield made
        made.tidy()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip where there is no GPU, and let no deprecation in the torch of one fail a check."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            for category in (DeprecationWarning, FutureWarning):
                item.add_marker(pytest.mark.filterwarnings(f"ignore::{category.__name__}"))
            if item.get_closest_marker("cuda") and not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def tell(record_property: Any) -> Any:
    """Note what a check has seen, for the line that is printed for it."""
    return lambda seen: record_property("seen", seen)
