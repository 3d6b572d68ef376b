"""Intervals of one device: exact where they can be; elsewhere lower bounds, said to be such.

A private meter is asked, because no allocator here has such counters.
"""

import pytest
import torch

from tenure.profiler import LineProfiler, ProfilerUsageError, ProfilerUsageWarning
from tenure.profiler._lines._book import DeviceMeter
from tenure.profiler._lines._targets import checked_device, chosen_device

FIELDS = ("current", "peak", "allocated", "freed")


class FakeAllocator:
    """A device module that has ``memory_stats``, counting like torch.cuda's, and nothing else."""

    def __init__(self):
        self.figures = dict.fromkeys(FIELDS, 0)

    def change(self, *changes):
        for n_bytes in changes:
            f = self.figures
            f["current"] += n_bytes
            f["peak"] = max(f["peak"], f["current"])
            f["allocated" if n_bytes > 0 else "freed"] += abs(n_bytes)

    def memory_stats(self, device):
        assert device == torch.device("cuda:0")
        return {f"allocated_bytes.all.{name}": value for name, value in self.figures.items()}


@pytest.fixture
def fake(monkeypatch):
    allocator = FakeAllocator()
    monkeypatch.setattr(torch, "get_device_module", lambda device: allocator)
    return allocator


def cuda_meter():
    return DeviceMeter(torch.device("cuda:0"))


def facts(meter, seen=None):
    return tuple(meter.read(seen))


@pytest.mark.parametrize(
    ("changes", "seen", "expected"),
    [
        ((), None, (0, 0, 100, True, True)),
        ((50,), None, (50, 0, 150, True, True)),  # only up: the end is the peak
        ((-50,), None, (0, 50, 100, True, True)),  # only down: the start is
        ((50, -30), None, (50, 30, 120, True, False)),  # below the old peak nobody can tell
        ((50, -30), [50, -30], (50, 30, 150, True, True)),  # unless the events were seen
        ((50, -30), [50], (50, 30, 120, True, False)),  # all of them: the rest did another thread
        ((50, -30), [50, -30, 20, -20], (50, 30, 120, True, False)),  # and of this device alone
        ((500, -500), None, (500, 500, 600, True, True)),  # a new peak is a peak
    ],
)
def test_peaks_without_a_reset_counter(fake, changes, seen, expected):
    fake.change(100, 200, -200)
    meter = cuda_meter()
    fake.change(*changes)
    assert facts(meter, seen) == expected


def test_counters_that_the_program_resets_meanwhile_do_not_go_backwards(fake):
    fake.change(1000, -900)
    meter = cuda_meter()
    fake.figures |= {"allocated": 0, "freed": 0, "peak": 100}
    fake.change(40, -10)
    assert facts(meter) == (40, 10, 130, True, False)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ((50,), (50, 0, 200, False, False)),  # somewhere below the old peak
        ((-50,), (0, 50, 150, False, False)),
        ((400, -500), (0, 100, 550, False, True)),  # a new peak is a peak
        ((), (0, 0, 150, True, True)),
    ],
)
def test_a_backend_without_running_counters_gives_what_the_ends_tell(fake, changes, expected):
    """As with cudaMallocAsync: what is live is counted, and its peak."""
    fake.change(150, 100, -100)
    fake.figures |= {"allocated": 0, "freed": 0}
    meter = cuda_meter()
    fake.change(*changes)
    fake.figures |= {"allocated": 0, "freed": 0}
    assert facts(meter) == expected


def test_devices_that_cannot_be_measured_are_refused():
    with pytest.raises(ProfilerUsageError, match=r"^'nowhere' is no device that can be measured: "):
        LineProfiler(device="nowhere")
    with pytest.raises(ProfilerUsageError, match=r"^'meta' is no device that can be measured: "):
        checked_device("meta")
    with pytest.raises(ProfilerUsageError, match=r"^target_gpu and device name the same thing"):
        LineProfiler(target_gpu=0, device="cpu")
    assert checked_device("cpu:0") == torch.device("cpu")


def test_a_device_that_is_not_there_or_has_no_statistics_is_refused(monkeypatch):
    class Module:
        @staticmethod
        def device_count():
            return 2

        @staticmethod
        def current_device():
            return 1

    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    message = (
        r"^cuda:1 can't be measured: torch.cuda has no memory_stats\(\). Measure the memory of the "
        r'CPU with set_target_device\("cpu"\).$'
    )
    with pytest.raises(ProfilerUsageError, match=message):
        checked_device("cuda:1")
    Module.memory_stats = staticmethod(lambda device: {})
    assert checked_device("cuda") == torch.device("cuda:1")
    message = '^cuda:7 is not there: this machine has 2 such devices. Name one that is, or "cpu".$'
    with pytest.raises(ProfilerUsageError, match=message):
        checked_device("cuda:7")


def test_without_an_accelerator_the_cpu_is_measured(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    assert chosen_device() == torch.device("cpu")
    assert LineProfiler().device == torch.device("cpu")
    with pytest.warns(
        ProfilerUsageWarning, match="^There is no GPU 3 here, and no other whose"
    ) as w:
        assert LineProfiler(target_gpu=3).device == torch.device("cpu")
    assert w[0].filename == __file__
    assert chosen_device("cpu") == torch.device("cpu")
