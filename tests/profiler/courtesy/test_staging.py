import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tenure.profiler._courtesy import _staging


def loads_of(sizes):
    """Storages with distinct bytes, on the CPU, and host memory of the same sizes."""
    storages = [torch.full((n,), i % 251, dtype=torch.uint8) for i, n in enumerate(sizes)]
    return [(t.untyped_storage(), torch.zeros(t.numel(), dtype=torch.uint8)) for t in storages]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 30))
def test_batches_hold_every_byte_once_and_never_more_than_a_buffer(sizes, capacity):
    loads = loads_of(sizes)
    batches = list(_staging._batches(loads, capacity))
    for batch in batches:
        ends = [(piece.start, piece.start + piece.host.numel()) for piece in batch]
        assert all(end == start for (_, end), (start, _) in itertools.pairwise(ends))
        assert ends[0][0] == 0
        assert 0 < ends[-1][1] <= capacity
    assert all(sum(p.host.numel() for p in batch) == capacity for batch in batches[:-1])
    for batch in batches:
        for piece in batch:
            piece.host.add_(1)
    assert all(host.tolist() == [1] * host.numel() for _, host in loads)


@pytest.mark.parametrize("size", [1, 7, 100, 101])
def test_bytes_go_there_and_back_whatever_the_buffer(sim, monkeypatch, size):
    monkeypatch.setattr(_staging, "_BUFFER_BYTES", 7)
    x = torch.arange(size, dtype=torch.uint8, device=sim.device)
    host = _staging.host_bytes(size)
    _staging.to_host([(x.untyped_storage(), host)], sim.device)
    assert host.tolist() == list(range(size))
    _staging.to_device([(x.untyped_storage(), host.add(1))], sim.device)
    assert x.tolist() == list(range(1, size + 1))


def test_a_module_without_events_is_served_directly(sim, monkeypatch):
    monkeypatch.delattr(sim.module, "Event")
    x = torch.arange(9, dtype=torch.uint8, device=sim.device)
    host = _staging.host_bytes(9)
    _staging.to_host([(x.untyped_storage(), host)], sim.device)
    assert host.tolist() == list(range(9))
    _staging.to_device([(x.untyped_storage(), host.add(1))], sim.device)
    monkeypatch.undo()
    assert x.tolist() == list(range(1, 10))


def test_host_memory_can_be_written_outside_of_inference_mode():
    with torch.inference_mode():
        host = _staging.host_bytes(4)
    assert host.fill_(3).tolist() == [3, 3, 3, 3]
