from types import SimpleNamespace

import torch

from tenure._torch.allocator import free_block_bytes, segments_of

DEVICE = torch.device("cuda", 1)


def _segment(pool, *blocks, index=1):
    made = [{"size": size, "state": state} for size, state in blocks]
    return {"device": index, "segment_pool_id": pool, "blocks": made}


def test_the_free_blocks_of_a_graphs_own_pool_serve_no_other_tensor():
    shared = _segment((0, 0), (512, "inactive"), (1024, "active_allocated"))
    private = _segment((0, 1), (4096, "inactive"))
    assert free_block_bytes([shared, private]) == [512]


def test_segments_are_those_of_the_device_that_is_asked_for():
    here, there = _segment((0, 0)), _segment((0, 0), index=0)
    module = SimpleNamespace(memory_snapshot=lambda: [there, here])
    assert segments_of(module, DEVICE) == [here]
    assert segments_of(SimpleNamespace(), DEVICE) == []
