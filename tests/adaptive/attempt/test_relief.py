"""What is given back after an out-of-memory error, so that the same size is worth a second try."""

import gc
import types

import pytest
import torch

from tenure import NewDisposeScope
from tenure._registries import shrinkables
from tenure.adaptive import oom_info
from tenure.adaptive._attempt import _relief
from tenure.adaptive._attempt._attempts import Attempts
from tenure.adaptive._attempt._relief import (
    Relief,
    free_bytes_of,
    pieces_in,
    unused_bytes_at,
)

from .test_attempts import Halving

MIB = 1 << 20


class FakeAllocator:
    """The memory statistics of a device whose allocator keeps a cache."""

    def __init__(self, allocated_bytes=0, cached_bytes=0, garbage_bytes=0):
        self.allocated_bytes = allocated_bytes + garbage_bytes
        self.cached_bytes = cached_bytes
        self.garbage_bytes = garbage_bytes
        self.calls = []

    def memory_allocated(self, device):
        return self.allocated_bytes

    def memory_reserved(self, device):
        return self.allocated_bytes + self.cached_bytes

    def mem_get_info(self, device):
        return 3 * MIB, 8 * MIB

    def empty_cache(self):
        self.calls.append("empty_cache")
        self.cached_bytes = 0

    def synchronize(self, device):
        self.calls.append(f"synchronize {device}")
        raise RuntimeError("CUDA error: an asynchronous error that waited")

    def collect(self):
        self.calls.append("collect")
        self.allocated_bytes -= self.garbage_bytes
        self.garbage_bytes = 0


@pytest.fixture
def allocator(monkeypatch):
    def install(**bytes_of):
        fake = FakeAllocator(**bytes_of)
        monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
        monkeypatch.setattr(_relief, "gc", types.SimpleNamespace(collect=fake.collect))
        return fake

    return install


def error_of(text="CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has ..."):
    return oom_info(RuntimeError(text))


def test_a_cache_that_could_hold_the_request_is_given_back(allocator):
    fake = allocator(allocated_bytes=MIB, cached_bytes=2 * MIB)
    info = error_of()
    assert Relief().make_room(info, unused_bytes_at(info)) == 2 * MIB
    assert fake.calls == ["synchronize cuda:0", "empty_cache"]


def test_a_cache_that_was_too_small_at_the_error_promises_nothing(allocator):
    fake = allocator(cached_bytes=MIB)
    info = error_of()
    scene = unused_bytes_at(info)
    fake.cached_bytes = 64 * MIB  # what the failed attempt has let go
    assert Relief().make_room(info, scene) == 0
    assert fake.calls == ["synchronize cuda:0", "collect"]


def test_what_the_error_says_was_unallocated_counts_before_what_died_since(allocator):
    fake = allocator(cached_bytes=64 * MIB)
    text = "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 8.00 GiB"
    info = error_of(f"{text}. Of it, 0 bytes is reserved by PyTorch but unallocated.")
    assert unused_bytes_at(info) == 0
    assert Relief().make_room(info, unused_bytes_at(info)) == 0
    assert "empty_cache" not in fake.calls
    info = error_of(f"{text}. Of it, 3.50 MiB is reserved by PyTorch but unallocated.")
    assert unused_bytes_at(info) == 7 * MIB // 2
    assert Relief().make_room(info, unused_bytes_at(info)) == 64 * MIB


def test_a_cache_cut_up_by_older_tensors_promises_nothing(sim):
    sim(allocator="cuda", budget="100MiB")
    kept = [torch.empty(4 * MIB, dtype=torch.uint8, device="sim") for _ in range(25)][::5]
    try:
        torch.empty(30 * MIB, dtype=torch.uint8, device="sim")
    except torch.OutOfMemoryError as error:
        info = oom_info(error)
    assert unused_bytes_at(info) == 80 * MIB
    assert Relief().make_room(info, 80 * MIB) == 0
    del kept


def test_the_advice_on_segments_is_left_out_where_it_was_taken(monkeypatch):
    text = "CUDA out of memory. Tried to allocate 2.00 MiB. Of the allocated memory"
    info = error_of(f"{text} 3.00 MiB is reserved by PyTorch but unallocated.")
    told = "At the last, 3.0 MiB were reserved and not allocated, in pieces"
    assert pieces_in(info).startswith(f"{told}: set PYTORCH_ALLOC_CONF=")
    settings = "max_split_size_mb:100,expandable_segments:True"
    name = "_accelerator_getAllocatorSettings"
    monkeypatch.setattr(torch._C, name, lambda: settings, raising=False)
    assert pieces_in(info) == f"{told}. "
    assert pieces_in(error_of(f"{text} 1.50 MiB is reserved by PyTorch but unallocated.")) == ""


def test_libraries_let_their_memory_go_once_before_giving_up(allocator, monkeypatch):
    fake = allocator(allocated_bytes=MIB)
    fake.workspace_bytes = 2 * MIB
    fake.memory_allocated = lambda device: fake.allocated_bytes + fake.workspace_bytes

    def clear(device):
        assert device == torch.device("cuda:0")
        fake.calls.append("clear")
        fake.workspace_bytes, fake.cached_bytes = 0, fake.workspace_bytes

    monkeypatch.setattr(_relief, "clear_workspaces", clear)
    info, relief = error_of(), Relief()
    assert relief.make_room(info, unused_bytes_at(info)) == 0
    assert "clear" not in fake.calls
    assert relief.last_resort(info) == 2 * MIB
    assert fake.calls[-2:] == ["clear", "empty_cache"]
    fake.workspace_bytes = 2 * MIB
    assert relief.last_resort(info) == 0


def test_less_than_was_wanted_of_libraries_promises_nothing(allocator, monkeypatch):
    fake = allocator(allocated_bytes=2 * MIB)
    monkeypatch.setattr(
        _relief, "clear_workspaces", lambda device: setattr(fake, "allocated_bytes", MIB)
    )
    assert Relief().last_resort(error_of()) == 0


def test_casts_of_weights_are_let_go_before_giving_up(sim):
    weight = torch.ones(512, 512, device=sim.device, requires_grad=True)
    with torch.autocast("sim", dtype=torch.bfloat16):
        (torch.ones(2, 512, device=sim.device) @ weight).sum()
        cast_bytes = weight.nbytes // 2
        before_bytes = sim.allocated_bytes
        text = f"sim:0 out of memory. Tried to allocate 512.0 KiB ({cast_bytes} bytes)."
        assert Relief().last_resort(oom_info(torch.OutOfMemoryError(text))) == cast_bytes
        assert before_bytes - sim.allocated_bytes == cast_bytes


class OfMps:
    """The functions of ``torch.mps`` that tell and change memory; all those that there are."""

    def __init__(self, allocated_bytes, cached_bytes):
        self.allocated_bytes, self.cached_bytes = allocated_bytes, cached_bytes
        self.calls = []

    def current_allocated_memory(self):
        return self.allocated_bytes

    def driver_allocated_memory(self):
        return self.allocated_bytes + self.cached_bytes

    def recommended_max_memory(self):
        return 64 * MIB

    def synchronize(self):
        self.calls.append("synchronize")

    def empty_cache(self):
        self.calls.append("empty_cache")
        self.cached_bytes = 0


def test_the_cache_of_mps_is_given_back_too(monkeypatch):
    fake = OfMps(4 * MIB, 3 * MIB)
    assert all(hasattr(torch.mps, name) for name in vars(OfMps) if not name.startswith("_"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    text = "MPS backend out of memory (MPS allocated: 4.00 MB). Tried to allocate 2.00 MB on"
    info, relief = oom_info(RuntimeError(text)), Relief()
    assert unused_bytes_at(info) == 3 * MIB
    assert relief.make_room(info, unused_bytes_at(info)) == 3 * MIB
    assert fake.calls == ["synchronize", "empty_cache"]
    assert relief.last_resort(info) == 0
    assert free_bytes_of(info) is None


def test_an_allocator_that_must_not_be_emptied_hides_nothing(allocator):
    fake = allocator(cached_bytes=2 * MIB)

    def empty_cache():
        raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    fake.empty_cache = empty_cache
    info = error_of()
    assert Relief().make_room(info, unused_bytes_at(info)) == 0


@pytest.mark.parametrize(
    "text", ["cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "CUDA driver error: out of memory"]
)
def test_the_cache_makes_room_for_those_outside_the_allocator(allocator, text):
    allocator(cached_bytes=MIB)
    info = error_of(text)
    assert info.kind in ("workspace", "driver")
    assert Relief().make_room(info, unused_bytes_at(info)) == MIB


def test_the_cache_is_given_back_once_for_a_piece_of_work(allocator):
    fake = allocator(cached_bytes=2 * MIB)
    info, relief = error_of(), Relief()
    assert relief.make_room(info, unused_bytes_at(info))
    fake.cached_bytes = 2 * MIB
    assert relief.make_room(info, unused_bytes_at(info)) == 0
    assert Relief().make_room(info, unused_bytes_at(info)) == 2 * MIB


def test_garbage_is_collected_once_and_counts_if_it_serves_the_request(allocator):
    fake = allocator(allocated_bytes=MIB, garbage_bytes=2 * MIB)
    info, relief = error_of(), Relief()
    assert relief.make_room(info, 0) == 2 * MIB
    fake.garbage_bytes = 2 * MIB
    assert relief.make_room(info, 0) == 0
    assert fake.calls.count("collect") == 1


def test_garbage_smaller_than_the_request_promises_nothing(allocator):
    allocator(garbage_bytes=MIB)
    assert Relief().make_room(error_of(), 0) == 0


def test_a_size_limit_needs_no_memory(allocator):
    fake = allocator(cached_bytes=64 * MIB, garbage_bytes=64 * MIB)
    info = oom_info(RuntimeError("Invalid buffer size: 1.00 MiB"))
    assert Relief().make_room(info, 64 * MIB) == 0
    assert fake.calls == []


def test_free_memory_is_read_from_the_device_or_the_host(allocator):
    assert free_bytes_of(oom_info(MemoryError())) > 0
    assert free_bytes_of(oom_info(RuntimeError("std::bad_alloc"))) > 0
    allocator()
    assert free_bytes_of(error_of()) == 3 * MIB


class OfOneDevice:
    """What torch has for a device without statistics, of which there is one: MPS."""

    def __init__(self):
        self.calls = []

    def synchronize(self):
        self.calls.append("synchronize")

    def collect(self):
        self.calls.append("collect")


def test_garbage_is_collected_also_where_nothing_tells_what_that_frees(monkeypatch):
    fake = OfOneDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    monkeypatch.setattr(_relief, "gc", types.SimpleNamespace(collect=fake.collect))
    info, relief = oom_info(RuntimeError("MPS backend out of memory (...)")), Relief()
    for _ in range(2):
        assert relief.make_room(info, unused_bytes_at(info)) == 0
    assert relief.last_resort(info) == 0
    assert fake.calls == ["synchronize", "collect", "synchronize"]


def test_garbage_is_collected_also_for_a_device_that_torch_does_not_find(monkeypatch):
    calls = []
    monkeypatch.setattr(_relief, "gc", types.SimpleNamespace(collect=lambda: calls.append(1)))
    info, relief = error_of("vega:3 out of memory. Tried to allocate 1.00 MiB"), Relief()
    assert relief.make_room(info, None) == relief.make_room(info, None)
    assert relief.last_resort(info) == 0
    assert calls == [1]


def test_free_memory_is_what_a_budget_leaves(allocator):
    fake = allocator()
    fake.get_device_properties = lambda device: types.SimpleNamespace(total_memory=8 * MIB)
    fake.get_per_process_memory_fraction = lambda device: 0.125
    fake.set_per_process_memory_fraction = lambda fraction, device: None
    fake.max_memory_allocated = fake.memory_allocated
    fake.reset_peak_memory_stats = lambda device: None
    assert free_bytes_of(error_of()) == MIB
    fake.allocated_bytes = 2 * MIB
    assert free_bytes_of(error_of()) == 0


class Lender:
    """Gives back so much, once."""

    def __init__(self, given_bytes):
        self.given_bytes = given_bytes

    def shrink(self, device, n_bytes):
        given_bytes, self.given_bytes = self.given_bytes, 0
        return given_bytes


@pytest.mark.parametrize(
    ("text", "given_bytes", "promised_bytes"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 MiB.", MIB, 0),
        ("CUDA out of memory. Tried to allocate 2.00 MiB.", 2 * MIB, 2 * MIB),
        ("CUDA error: out of memory", MIB, MIB),
    ],
    ids=["less than was wanted", "as much", "unknown"],
)
def test_less_than_was_wanted_promises_nothing_whoever_gives_it(
    allocator, text, given_bytes, promised_bytes
):
    allocator()
    info, lender = error_of(text), Lender(given_bytes)
    shrinkables.add(lender)
    try:
        assert Relief().make_room(info, 0) == promised_bytes
    finally:
        shrinkables.discard(lender)
    assert lender.given_bytes == 0


def test_a_device_that_is_not_there_promises_nothing():
    info = oom_info(RuntimeError("vega:3 out of memory. Tried to allocate 1.00 MiB"))
    assert unused_bytes_at(info) is None
    assert Relief().make_room(info, None) == 0
    assert free_bytes_of(info) is None


def test_garbage_of_the_host_is_collected_before_giving_up(monkeypatch):
    resident = iter([64 * MIB, 16 * MIB])
    process = types.SimpleNamespace(
        memory_info=lambda: types.SimpleNamespace(rss=next(resident)),
    )
    monkeypatch.setattr(_relief.psutil, "Process", lambda: process)
    info = oom_info(
        RuntimeError(
            "DefaultCPUAllocator: can't allocate memory: you tried to "
            "allocate 33554432 bytes. Error code 12"
        )
    )
    relief = Relief()
    assert relief.make_room(info, None) == 0
    assert relief.last_resort(info) == 48 * MIB
    assert relief.last_resort(info) == 0


def test_older_cycles_on_the_device_are_collected_before_the_size_shrinks(sim):
    class Cycle:
        def __init__(self):
            self.me = self
            self.tensor = torch.empty(600, dtype=torch.uint8, device="sim")

    gc.collect()
    gc.disable()
    try:
        Cycle()
        sim.budget_bytes = 1000
        with NewDisposeScope("test") as scope:
            size = Attempts("work", scope).run(
                Halving(500),
                lambda size: torch.empty(size, dtype=torch.uint8, device="sim").numel(),
            )
    finally:
        gc.enable()
    assert size == 500
