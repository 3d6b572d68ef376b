"""What the allocator of the CPU saw at the worst moment of a step, from torch's own events.

By private names, because torch's own profilers can't be nested, and no public name predicts what a
budget counts.
"""

import gc

from tenure._torch import allocations
from tenure.adaptive._predict import Work
from tenure.adaptive._predict._predict import report_of


def true_peak_bytes(work):
    """The most that was alive while ``work`` ran, beyond what was alive before, in bytes."""
    gc.collect()
    allocations.begin()
    kept = work()
    changes = allocations.end().cpu
    del kept
    live = peak = 0
    for n_bytes in changes:
        live += n_bytes
        peak = max(peak, live)
    return peak


def counted_bytes(fn, batch, optimizer=None):
    """What a budget would count of a step beyond what was alive before, by prediction."""
    report = report_of(Work(fn, (batch,), {}, optimizer, None), is_counted=True)
    return report.peak_bytes - report.baseline_bytes


def step_of(fn, batch, optimizer):
    """One whole training step, as users write it, whose result lives to its end."""

    def work():
        loss = fn(batch)
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        return loss

    return work
