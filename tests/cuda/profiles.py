"""The line profiler and the timeline, by the device's own account of its memory."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from tenure import NewDisposeScope
from tenure.profiler import LineProfiler, Timeline

from .rig import check


@check()
def lines_add_up(rig):
    """The bytes of all lines are those that the allocator has counted."""
    model = nn.Linear(256, 256).to(rig.device)
    x = torch.ones(64, 256, device=rig.device)

    def work():
        loss = model(x).pow(2).sum()
        loss.backward()
        model.zero_grad()

    work()
    before = rig.module.memory_stats(rig.device)
    with LineProfiler(work, nn.Linear.forward, device=rig.device) as profiler:
        work()
    after = rig.module.memory_stats(rig.device)
    found = {}
    for figure in ("allocated", "freed"):
        name = f"allocated_bytes.all.{figure}"
        found[figure] = sum(getattr(record, f"{figure}_bytes") for record in profiler.records)
        assert found[figure] == after[name] - before[name], (figure, found, after[name])
    assert found["allocated"] > 0
    return found


@check()
def lines_have_the_peak(rig):
    """The largest peak of a line is `max_memory_allocated`."""
    weight = torch.randn(1024, 1024, device=rig.device, requires_grad=True)

    def work():
        x = torch.ones(512, 1024, device=rig.device)
        hidden = (x @ weight).relu()
        x = (hidden @ weight).square()
        x.sum().backward()
        return hidden.detach()

    work()
    weight.grad = None
    rig.tidy()
    rig.reset_peak()
    before = rig.allocated()
    with LineProfiler(work, device=rig.device) as profiler:
        kept = work()
    found = max(record.peak_bytes for record in profiler.records)
    real = rig.peak() - before
    assert found == real, (found, real)
    assert sum(record.net_bytes for record in profiler.records) == rig.allocated() - before
    del kept
    return {"peak_bytes": real, "lines": len(profiler.records)}


@check()
def lines_of_two_threads(rig):
    """The lines of two threads have their own bytes, or say that they may not."""
    turns = threading.Barrier(2)

    def work():
        turns.wait()
        kept = [rig.bytes(1000 * 512) for _ in range(4)]
        turns.wait()
        return kept

    with LineProfiler(work, device=rig.device) as profiler, ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: work(), range(2)))
    booked = sum(record.allocated_bytes for record in profiler.records)
    exact, truth = all(record.exact for record in profiler.records), 2 * 4 * 1000 * 512
    assert booked == truth or not exact, (booked, truth)
    return {"booked_bytes": booked, "of_bytes": truth, "exact": exact}


@check()
def timeline_has_the_peak(rig):
    """The peak is that of the allocator, and at each time all bands add up to the level."""
    width, n_samples = rig.pick((512, 2048), (64, 32))
    layers = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
    model = nn.Sequential(*layers).to(rig.device)
    optimizer = torch.optim.AdamW(model.parameters())

    def train():
        for _ in range(rig.pick(3, 1)):
            with NewDisposeScope("step"):
                x = torch.ones(n_samples, width, device=rig.device)
                model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    train()
    rig.tidy()
    rig.reset_peak()
    train()
    plain = rig.peak()
    rig.reset_peak()
    with Timeline() as timeline:
        train()
    real = rig.peak()
    found = next(each for each in timeline.report.devices if each.device == str(rig.device))
    assert found.peak_bytes == real, (found.peak_bytes, real)
    for bands in (found.by_category, found.by_scope):
        for number, level in enumerate(found.live_bytes):
            assert sum(series[number] for series in bands.values()) == level
    # autograd adds gradients out of place while it records
    largest = max(parameter.nbytes for parameter in model.parameters())
    assert plain <= real <= plain + largest, (plain, real)
    sizes = {"times": len(found.times_s), "notes": len(timeline.report.notes)}
    return {"peak_bytes": real, "plain_peak_bytes": plain, **sizes}
