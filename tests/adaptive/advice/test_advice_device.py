"""Advice on an accelerator: what leaves the device, and comes back."""

import torch
from torch import nn

import tenure
from tenure.adaptive import predict_peak
from tenure.paging import page

from .test_advice import the_advice_on


def test_paging_is_named_beside_activations_on_the_host_and_trains(sim):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).to("sim")
    x = torch.ones(512, 64, device="sim")
    fn = lambda x: model(x).square().mean()  # noqa: E731
    found = the_advice_on("on the host", predict_peak(fn, x))

    def by_hand(x):
        with torch.autograd.graph.save_on_cpu():
            return fn(x)

    assert predict_peak(by_hand, x).peak_bytes == found.peak_bytes
    # the same of a device that is not here, for which the CPU stands
    model.cpu()
    same = the_advice_on("on the host", predict_peak(fn, x.cpu(), device="cuda"))
    assert (same.saves_bytes, same.peak_bytes) == (found.saves_bytes, found.peak_bytes)
    assert predict_peak(by_hand, x.cpu(), device="cuda").peak_bytes == found.peak_bytes
    model.to("sim")
    code, _, paging = found.how.partition("  # or, with the weights: ")
    assert code.endswith("loss = fn(batch)")
    assert paging == ('tenure.paging.page(model.cpu(), "sim:0", training=True, activations="host")')
    whole = model(x).square().mean().item()
    with eval(paging, {"tenure": tenure, "model": model}) as paged:
        loss = paged(x).square().mean()
        loss.backward()
        assert loss.item() == whole


def test_paged_weights_take_what_was_told(sim):
    with torch.no_grad():
        model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(12))).to("sim")
        x = torch.ones(64, 128, device="sim")
        report = predict_peak(model, x)
        found = the_advice_on("page the weights", report)
        n_bytes = sum(p.nbytes for p in model.parameters())
        assert found.saves_bytes == n_bytes * 10 // 12
        assert found.how == f'tenure.paging.page(model.cpu(), "sim:0", budget={n_bytes // 6})'
        model.cpu()
        before = sim.allocated_bytes
        with page(model, "sim", budget=n_bytes // 6) as paged:
            torch.sim.reset_peak_memory_stats()
            paged(x)
            taken = torch.sim.max_memory_allocated() - before + x.nbytes
        # slabs are rounded as the allocator does
        assert taken <= found.peak_bytes + 4096
