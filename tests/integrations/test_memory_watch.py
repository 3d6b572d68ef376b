"""What callbacks log of a device's memory; the tests of the libraries have what they do on a host.

The watch is private, because the callbacks of three libraries make it; here none has to train.
"""

import pytest
import torch

from tenure.integrations._memory_watch import MemoryWatch


@pytest.mark.simdevice
def test_the_allocator_of_a_device_is_asked(sim):
    watch = MemoryWatch()
    watch.begin("sim")
    kept = [torch.ones(1000, device="sim")]
    assert watch.figures()["memory/allocated_bytes"] == torch.sim.memory_allocated()
    kept.append(torch.ones(1000, device="sim"))
    assert watch.figures()["memory/growth_bytes"] > 0
