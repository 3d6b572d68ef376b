"""Adaptive retries and the pager: memory is given back before a batch gets smaller."""

import pytest
import torch
from torch import nn

from tenure.adaptive import batch
from tenure.paging import page


# a little less than the activations take is part of a segment
@pytest.mark.sim_allocator("exact")
def test_a_retry_has_the_pager_give_memory_back_before_the_batch_shrinks(sim):
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]).eval()
    weight_bytes = sum(p.nbytes for p in model.parameters())
    events, sizes = [], []

    @batch(initial_batchsize=64, on_retry=events.append)
    def forward(batch_size):
        sizes.append(batch_size)
        return model(torch.ones(batch_size, 64)).sum().item()

    with page(model, sim.device, budget=weight_bytes * 3 // 4) as handle, torch.no_grad():
        whole = forward()
        resident_bytes = handle.report().resident_bytes
        sim.reset_peak()
        forward()
        needed_bytes = sim.peak_bytes
        sim.budget_bytes = needed_bytes - 1024  # a little less than the activations take
        assert forward() == whole
        assert handle.report().resident_bytes < resident_bytes
    assert set(sizes) == {64}
    assert [event.kind for event in events] == ["retry"]
    assert events[0].freed_bytes >= 1024
