"""Recordings, and snapshots as torch writes them, made by hand."""

import pickle

from tenure.profiler import Growth, PeakRow, Recording, Track

MIB = 1 << 20


def track(device="cpu", *levels, at_peak=()):
    """A moment each second."""
    times = tuple(float(i) for i in range(len(levels)))
    peak = max(levels)
    return Track(device, times, tuple(levels), peak, times[levels.index(peak)], tuple(at_peak))


def block(n_bytes, *stack, scope="", category="", n=1):
    return PeakRow(category, scope, tuple(stack), n_bytes, n)


def recording(**changes):
    facts = {
        "command": ("python", "train.py", "--lr", "1e-3"),
        "began_at": "2026-01-02T03:04:05+00:00",
        "duration_s": 12.5,
        "ended": "exit code 0",
        "exit_code": 0,
        "versions": {"python": "3.11.7", "tenure": "0.1.0", "torch": "2.13.0"},
        "peaks": {"cpu": 3 * MIB, "cuda:0": 5 * MIB},
    }
    return Recording(**{**facts, **changes})


def growth(name="losses", **changes):
    facts = {
        "n_before": 2,
        "n_tensors": 8,
        "before_bytes": 8,
        "n_bytes": 32,
        "first_step": 2,
        "last_step": 8,
        "graph_bytes": MIB,
    }
    return Growth(name, **{**facts, **changes})


def frames(*places):
    """As torch has them: the innermost first."""
    return [{"filename": file, "line": line, "name": name} for file, line, name in reversed(places)]


def event(action, address, n_bytes, at_us, *places):
    return {
        "action": action,
        "addr": address,
        "size": n_bytes,
        "stream": 0,
        "time_us": at_us,
        "frames": frames(*places),
    }


def torch_snapshot():
    """A block of before and one that stays, one that goes at the peak, and one after it."""
    main, step = ("train.py", 9, "<module>"), ("train.py", 4, "step")
    kept = {"state": "active_allocated", "size": 4 * MIB, "requested_size": 4 * MIB}
    segment = {
        "device": 0,
        "address": 0,
        "total_size": 20 * MIB,
        "blocks": [
            {**kept, "address": 0, "frames": []},
            {**kept, "address": 4 * MIB, "frames": frames(main, step)},
            {"state": "inactive", "size": 12 * MIB, "requested_size": 0, "address": 8 * MIB},
        ],
    }
    trace = [
        event("segment_alloc", 0, 20 * MIB, 1_000_000),
        event("alloc", 4 * MIB, 4 * MIB, 2_000_000, main, step),
        event("alloc", 8 * MIB, 8 * MIB, 3_000_000, main, ("model.py", 7, "forward")),
        event("free_requested", 8 * MIB, 8 * MIB, 4_000_000),
        event("free_completed", 8 * MIB, 8 * MIB, 4_000_000),
        event("alloc", 8 * MIB, MIB, 5_000_000, main),
        event("free_completed", 8 * MIB, MIB, 6_000_000),
    ]
    return {"segments": [segment], "device_traces": [trace, []]}


def pickled(path, value, protocol=4):
    path.write_bytes(pickle.dumps(value, protocol=protocol))
    return path
