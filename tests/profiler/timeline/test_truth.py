"""Peaks are the allocator's, to the byte; every division adds up to the level at each time."""

import pytest
import torch

from tenure.profiler import Timeline
from tests.true_peak import true_peak_bytes

from .programs import CASES, training


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check_sums(report):
    for device in report.devices:
        assert len(device.times_s) == len(device.live_bytes)
        assert list(device.times_s) == sorted(set(device.times_s))
        for division in (device.by_category, device.by_scope, device.by_line):
            assert [sum(at) for at in zip(*division.values(), strict=True)] == [*device.live_bytes]
            assert all(n_bytes >= 0 for series in division.values() for n_bytes in series)
        assert sum(row.n_bytes for row in device.at_peak) == device.peak_bytes
        assert device.peak_bytes == max(device.live_bytes)
        assert device.live_bytes[device.times_s.index(device.peak_at_s)] == device.peak_bytes


@pytest.mark.parametrize("name", CASES)
def test_the_peak_of_a_training_step_is_that_of_the_allocator(name):
    plain = training(name)()
    truth = true_peak_bytes(training(name))
    train = training(name)
    with Timeline() as timeline:
        seen = train()
    # a recording changes no weight
    assert all(map(torch.equal, plain, seen))
    report = timeline.report
    host = report.devices[0]
    assert host.peak_bytes - host.live_bytes[0] == truth
    assert report.notes == ()
    check_sums(report)


@pytest.mark.parametrize("name", ["GPT", "checkpoints"])
def test_the_peak_of_an_accelerator_is_that_of_its_allocator(sim, name):
    train = training(name, device="sim")
    torch.sim.reset_peak_memory_stats()
    with Timeline() as timeline:
        train()
    report = timeline.report
    device = next(each for each in report.devices if each.device == "sim:0")
    assert device.peak_bytes == torch.sim.max_memory_allocated()
    assert report.notes == ()
    check_sums(report)
    known = sum(row.n_bytes for row in device.at_peak if row.n_storages)
    assert known > 0.9 * device.peak_bytes
