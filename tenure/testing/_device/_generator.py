"""Random numbers of the device: a generator of its own, apart from the host's.

The state moves only with operations that run on the device; an operation that fails leaves it as it
was. `torch.Generator(device="sim")` cannot be made from Python: pass a CPU generator instead.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# As torch's own default seed: c10/core/GeneratorImpl.h.
_DEFAULT_SEED = 67280421310721


class DeviceRandom:
    """The seeded state that random operations on the device draw from."""

    def __init__(self) -> None:
        # Without it one of two threads would leave the other's state behind.
        self._lock = threading.RLock()
        self.seed(_DEFAULT_SEED)

    def seed(self, seed: int) -> None:
        """Start the sequence that belongs to `seed`."""
        self.initial_seed = seed
        self._state = torch.Generator().manual_seed(seed).get_state()

    def state(self) -> torch.Tensor:
        """The state as uint8 on the host; a copy."""
        return self._state.clone()

    def set_state(self, state: torch.Tensor) -> None:
        """Go back to a state from `state`."""
        self._state = state.detach().cpu().clone()

    @contextmanager
    def drawing_again(self, state: torch.Tensor) -> Iterator[None]:
        """`drawing` from a state of the past; what the next operation draws stays."""
        with self._lock:
            kept, self._state = self._state, state
            try:
                with self.drawing():
                    yield
            finally:
                self._state = kept

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Let the host's default generator stand in for the device's inside the block."""
        with self._lock:
            host_state = torch.get_rng_state()
            torch.set_rng_state(self._state)
            try:
                yield
                self._state = torch.get_rng_state()
            finally:
                torch.set_rng_state(host_state)
