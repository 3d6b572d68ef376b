"""Random programs of tensors and courtesies, beside a model that never moves anything."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tenure.profiler import AwayTensorError, Courtesy, CourtesyError

OPERATIONS = st.sampled_from(["make", "view", "drop", "write", "yield", "restore", "starve"])
PROGRAMS = st.lists(st.tuples(OPERATIONS, st.integers(0, 7)), max_size=25)


class Program:
    """Tensors of the device, each beside a twin on the host that shares as they do."""

    def __init__(self, sim):
        self.sim = sim
        self.pairs = []
        self.courtesies = [Courtesy() for _ in range(3)]

    def step(self, operation, n):
        getattr(self, f"do_{operation}")(n)
        self.check()

    def do_make(self, n):
        twin = torch.arange(2.0 * n, 2.0 * n + 6)
        self.pairs.append((twin.to(self.sim.device), twin))

    def do_view(self, n):
        if self.pairs:
            t, twin = self.pairs[n % len(self.pairs)]
            if self.is_away(t):
                with pytest.raises(AwayTensorError):
                    t[1:]
            else:
                self.pairs.append((t[1:], twin[1:]))

    def do_drop(self, n):
        if self.pairs:
            self.pairs.pop(n % len(self.pairs))

    def do_write(self, n):
        if self.pairs:
            t, twin = self.pairs[n % len(self.pairs)]
            if not self.is_away(t):
                t.add_(1)
                twin.add_(1)

    def do_yield(self, n):
        self.courtesies[n % 3].yield_memory()

    def do_restore(self, n):
        self.courtesies[n % 3].restore()
        assert self.courtesies[n % 3].away_bytes == 0

    def do_starve(self, n):
        courtesy = self.courtesies[n % 3]
        if courtesy.away_bytes:
            self.sim.fail_at(1)
            with pytest.raises(CourtesyError, match="no memory"):
                courtesy.restore()

    def is_away(self, t):
        return type(t) is not torch.Tensor

    def check(self):
        away_bytes = sum(courtesy.away_bytes for courtesy in self.courtesies)
        live_bytes = sum(twin.untyped_storage().nbytes() for _, twin in self.distinct())
        assert self.sim.requested_bytes + away_bytes == live_bytes
        for t, twin in self.pairs:
            assert self.is_away(t) or torch.equal(t.cpu(), twin)
            assert t.stride() == twin.stride()
            assert t.storage_offset() == twin.storage_offset()

    def distinct(self):
        """One pair for each storage."""
        return {p[1].untyped_storage()._cdata: p for p in self.pairs}.values()


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(program=PROGRAMS)
def test_no_program_loses_a_byte_or_holds_one_twice(sim, program):
    sim()
    run = Program(sim)
    for operation, n in program:
        run.step(operation, n)
    for courtesy in run.courtesies:
        courtesy.restore()
    run.check()
    assert all(type(t) is torch.Tensor for t, _ in run.pairs)
