"""Real out-of-memory errors: of the allocators here, under a limit, and of the simulated device."""

import sys

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tenure.adaptive import is_oom, oom_info
from tests.programs import run_program


def _failure(call):
    """The error of a call that must fail; which one it is, is what the tests look at."""
    try:
        call()
    except Exception as error:
        return error
    pytest.fail("it fitted")


class _Unallocatable(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return numpy.empty((2**20, 2**36))


@pytest.mark.parametrize(
    ("call", "requested_bytes"),
    [
        (lambda: torch.empty(2**60, dtype=torch.uint8), 2**60),
        (lambda: torch.zeros(2).untyped_storage().resize_(2**60), 2**60),
        (lambda: numpy.empty((2**20, 2**36)), 2**59),
        (lambda: [0] * 2**60, None),
        (lambda: next(iter(DataLoader(_Unallocatable(), num_workers=1))), 2**59),
    ],
    ids=["torch", "a storage that grows", "numpy", "python", "a worker of a data loader"],
)
def test_memory_of_the_host(call, requested_bytes):
    info = oom_info(_failure(call))
    assert (info.kind, info.device, info.requested_bytes) == ("host", "cpu", requested_bytes)
    assert info.retry_safe


def test_a_size_that_overflows_is_a_bug_and_none():
    assert not is_oom(_failure(lambda: torch.empty(2**62, 2**62)))


_UNDER_A_LIMIT = """
import resource, torch
from pathlib import Path
from tenure.adaptive import oom_info

pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + (256 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for call in (
    lambda: [torch.empty(1 << 24) for _ in range(64)],
    lambda: torch.UntypedStorage._new_shared(1 << 29),
    lambda: bytearray(1 << 29),
):
    try:
        call()
    except Exception as error:
        info = oom_info(error)
        print(info.kind, info.device, info.requested_bytes, info.chain)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit needs RLIMIT_AS and /proc")
def test_under_a_limit_of_the_address_space():
    done = run_program(_UNDER_A_LIMIT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "host cpu 67108864 ('RuntimeError',)",
        "host cpu 536870912 ('RuntimeError',)",
        "host cpu None ('MemoryError',)",
    ]


def test_the_simulated_device(sim):
    sim(allocator="exact", budget="64KiB")
    info = oom_info(_failure(lambda: torch.empty(65_540, dtype=torch.uint8, device=sim.device)))
    assert (info.kind, info.device, info.requested_bytes) == ("device", "sim:0", 65_540)
    assert info.chain == ("torch.OutOfMemoryError",)
    sim(allocator="cuda", budget="64KiB")
    info = oom_info(_failure(lambda: torch.empty(4, device=sim.device)))
    assert (info.kind, info.device, info.requested_bytes) == ("device", "sim:0", 2 << 20)


def test_the_simulated_device_in_a_backward_pass(sim):
    x = torch.ones(64, device=sim.device, requires_grad=True)
    loss = (x * x).sum()
    sim.fail_at(1)
    info = oom_info(_failure(loss.backward))
    assert (info.kind, info.device, info.retry_safe) == ("device", "sim:0", True)
