"""What a timeline and what grew tell a page, by their attributes alone."""

from types import SimpleNamespace

MIB = 2**20


def timeline(**changes):
    place = {"category": "parameters", "scope": "step", "n_storages": 2, "was_before": False}
    rows = [
        SimpleNamespace(**place, stack=("train.py:9 in main", "model.py:3 in f"), n_bytes=3 * MIB),
        SimpleNamespace(**{**place, "n_storages": 0}, stack=(), n_bytes=5 * MIB),
    ]
    device = SimpleNamespace(
        device="cuda:0",
        times_s=(0.0, 1.0, 2.0),
        live_bytes=(MIB, 8 * MIB, 2 * MIB),
        peak_bytes=8 * MIB,
        peak_at_s=1.0,
        by_category={"parameters": (MIB, 8 * MIB, 2 * MIB), "inputs": (0, 0, 0)},
        by_scope={"step": (MIB, 8 * MIB, 2 * MIB)},
        by_line={"model.py:3": (MIB, 8 * MIB, 2 * MIB)},
        at_peak=tuple(rows),
    )
    host = SimpleNamespace(
        times_s=(0.0, 1.5),
        rss_bytes=(50 * MIB, 90 * MIB),
        tensors_bytes=(MIB, 80 * MIB),
        python_heap_bytes=(20 * MIB, 20 * MIB),
        allocator_slack_bytes=(MIB, MIB),
        rest_bytes=(28 * MIB, 0),
    )
    given = {
        "devices": (device,),
        "scopes": (SimpleNamespace(name="step", depth=0, begin_s=0.0, end_s=2.5),),
        "ooms": (SimpleNamespace(at_s=1.0, text="CUDA out of memory."),),
        "host": host,
        "duration_s": 3.0,
        "notes": ("Other threads were not seen.",),
    }
    return SimpleNamespace(**{**given, **changes})


class Grown(SimpleNamespace):
    name, grown_bytes, n_steps = "losses", 4 * MIB, 6

    def __str__(self):
        return "losses grew by 4.0 MiB in 6 steps."
