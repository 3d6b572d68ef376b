"""Which device is meant, and what its module tells, on modules that a test made up.

By private names, because no machine has all of these devices.
"""

from types import SimpleNamespace

import pytest
import torch

from tenure._devices import (
    Counters,
    Elsewhere,
    accelerator_of,
    counters_of,
    free_memory,
    indexed,
    is_here,
    told_by,
)
from tenure._graph_capture import is_capturing

CPU = torch.device("cpu")
CUDA = torch.device("cuda:0")


@pytest.fixture
def module(monkeypatch):
    """Has the functions that a test gives it, and stands for every device's."""
    made = SimpleNamespace()
    monkeypatch.setattr(torch, "get_device_module", lambda device: made)
    return made


def refusing(*_):
    raise RuntimeError("not on this backend")


def test_a_device_has_its_index_or_the_current_one_but_for_the_hosts(module):
    assert indexed("cuda:3") == torch.device("cuda:3")
    assert indexed("mps") == torch.device("mps:0")
    module.current_device = lambda: 2
    assert indexed("cuda") == torch.device("cuda:2")
    assert accelerator_of("cuda") == (module, torch.device("cuda:2"))
    module.current_device = refusing
    assert accelerator_of("cuda") is None
    for device in ("cpu:0", "meta"):
        assert indexed(device) == torch.device(torch.device(device).type)
        assert accelerator_of(device) is None
    # what torch does not know
    assert accelerator_of(None) is accelerator_of("vega:3") is None


STATS = {
    "allocated_bytes.all.current": 1536,
    "requested_bytes.all.current": 1100,
    "active_bytes.all.current": 2048,
    "reserved_bytes.all.current": 4096,
    "inactive_split_bytes.all.current": 512,
}


def test_statistics_tell_what_they_have_and_single_functions_the_rest(module):
    module.memory_stats = lambda device: STATS
    assert counters_of(module, CUDA) == Counters(1536, 1100, 2048, 4096, 512)
    module.memory_stats = lambda device: {"allocated_bytes.all.current": 0}
    module.memory_allocated = lambda device: pytest.fail("it was told")
    module.memory_reserved = lambda device: 20
    assert counters_of(module, CUDA) == Counters(0, None, None, 20, None)


@pytest.mark.parametrize("stats", [None, refusing, lambda device: {}])
def test_without_statistics_the_single_functions_are_asked(module, stats):
    if stats is not None:
        module.memory_stats = stats
    module.memory_allocated = lambda device: 10 + device.index
    assert counters_of(module, CUDA) == Counters(10, None, None, None, None)
    module.memory_reserved = lambda device: 20 + device.index
    assert counters_of(module, torch.device("cuda:1")) == Counters(11, None, None, 21, None)
    module.memory_stats = module.memory_allocated = module.memory_reserved = refusing
    assert counters_of(module, CUDA) == Counters(None, None, None, None, None)
    assert told_by(module, "memory_stats", CUDA) is told_by(module, "mem_get_info", CUDA) is None


def test_the_only_device_of_its_kind_has_its_own_names(module):
    module.current_allocated_memory = lambda: 10
    module.driver_allocated_memory = lambda: 30
    names = vars(module)
    assert all(hasattr(torch.mps, name) for name in names)
    assert counters_of(module, torch.device("mps:0")) == Counters(10, None, None, 30, None)


def test_a_memory_fraction_bounds_what_is_free(sim):
    sim(allocator="cuda", budget="100MiB")
    kept = torch.empty(20 << 20, dtype=torch.uint8, device=sim.device)
    assert free_memory(sim.module, sim.device) == (80 << 20, 100 << 20)
    sim.module.set_per_process_memory_fraction(0.5)
    assert free_memory(sim.module, sim.device) == (30 << 20, 50 << 20)
    sim.module.set_per_process_memory_fraction(1.0)
    del kept


def test_a_device_captures_what_its_module_says_once_it_is_initialized(monkeypatch, module):
    module.is_initialized = lambda: False
    module.is_current_stream_capturing = lambda: pytest.fail("this would create a context")
    assert not is_capturing(CUDA)
    module.is_initialized = lambda: True
    for answer in (True, False):
        module.is_current_stream_capturing = lambda answer=answer: answer
        assert is_capturing(CUDA) is answer
    monkeypatch.undo()
    assert not any(is_capturing(torch.device(each)) for each in ("cpu", "cuda", "xpu"))


@pytest.mark.parametrize("keeps_names", [True, False])
def test_what_is_made_on_a_device_that_is_not_here_is_made_on_the_other_one(keeps_names):
    with Elsewhere("xpu".__eq__, CPU, keeps_names=keeps_names):
        for made in (
            torch.ones(2).xpu(),
            torch.ones(2).to(torch.device("xpu")),
            torch.ones(2, device="xpu"),
            torch.nn.Linear(2, 2, device="xpu").to("xpu").weight,
        ):
            assert made.device == CPU
        assert torch.device("xpu").type == ("xpu" if keeps_names else "cpu")
        assert torch.ones(2, device="meta").device.type == "meta"


def test_a_backend_that_nobody_knows_is_not_here():
    assert is_here("cpu")
    assert not is_here("hpu")
    assert not is_here("no such backend")
