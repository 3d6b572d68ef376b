"""The surface on a device on which any allocation may fail: nothing is lost, repeated or left."""

import pytest
import torch

from tenure import adaptive
from tenure.testing import for_each_allocation

pytestmark = pytest.mark.usefixtures("forgetful")


def test_a_failure_of_any_allocation_loses_and_repeats_nothing(sim):
    rows = torch.arange(24.0).reshape(12, 2).to(sim.device)
    weights = torch.ones(2, 3).to(sim.device)
    expected = (rows.cpu() @ weights.cpu()).relu().sum(1)
    resting_bytes = sim.allocated_bytes
    escaped, done, results = [], [], []

    @adaptive.chunked(initial_step=8, collect="list", cache_type=adaptive.NoBatchsizeCache)
    def work(chunk, start, end):
        hidden = chunk @ weights
        escaped.append(hidden)
        result = hidden.relu().sum(1)
        done.append((start, end))
        return result

    def run():
        escaped.clear()
        done.clear()
        results[:] = work(rows)

    def check(failure):
        assert failure.error is None
        assert [start for start, _ in done] == [0, *(end for _, end in done[:-1])]
        assert done[-1][1] == 12
        assert torch.equal(torch.cat([result.cpu() for result in results]), expected)
        escaped.clear()
        results.clear()
        assert sim.allocated_bytes == resting_bytes

    assert for_each_allocation(run, check) >= 6


def test_tensors_of_a_failed_attempt_that_escaped_are_gone_before_the_next(sim):
    sim(budget="100MiB")
    escaped = []

    @adaptive.batch(initial_batchsize=8)
    def f(batchsize):
        assert sim.allocated_bytes == 0
        escaped.append(torch.empty(batchsize * 9 << 20, dtype=torch.uint8, device=sim.device))
        escaped.append(torch.empty(batchsize * 9 << 20, dtype=torch.uint8, device=sim.device))
        return batchsize

    assert f() == 4
    assert sim.allocated_bytes == 2 * 4 * 9 << 20
