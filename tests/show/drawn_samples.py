"""A training run as drawings: three steps, a pile that grows, memory that runs out."""

from pathlib import Path
from tempfile import TemporaryDirectory

from tenure.profiler import (
    DeviceTimeline,
    HostTimeline,
    OomMark,
    PeakRow,
    Recording,
    ScopeSpan,
    TimelineReport,
)

MIB = 2**20
# Not one of them may become markup, reach out of its cell, or hide what stands beside it.
HOSTILE = {
    name: name
    for name in (
        "</script><script>window.broken = 1</script>",
        "<img src=x onerror='window.broken = 1'>",
        '"\' onmouseover="window.broken = 1" x=\'',
        "<!-- ]]> &amp; &#0; %s ${window.broken = 1}",
        "__proto__",
        "very" * 400 + "long",
    )
} | {
    "\u202eright to left\u202d \u05e9\u05dc\u05d5\u05dd": (
        r"\u202eright to left\u202d " + "\u05e9\u05dc\u05d5\u05dd"
    ),
    "zero\u200bwidth\x1b\U000e0041": r"zero\u200bwidth\x1b\U000e0041",
    "line\nbreak\ttab\0nul \ud800 \u2028\u2029": (
        "line\nbreak   tab" + r"\x00nul \ud800 \u2028\u2029"
    ),
}
"""By name how it is shown."""
CATEGORIES = {
    "parameters": [40] * 12,
    "gradients": [0, 0, 40, 0, 0, 40, 0, 0, 40, 0, 0, 0],
    "saved for backward": [0, 90, 30, 0, 90, 30, 0, 90, 30, 0, 95, 0],
    "other tensors": [0, 1, 2, 10, 11, 12, 20, 21, 22, 30, 31, 30],
    "inputs": [0] * 12,
}
TIMES = [i / 4 for i in range(12)]
SERIES = {name: [n * MIB for n in values] for name, values in CATEGORIES.items()}
LEVELS = [sum(values) for values in zip(*SERIES.values(), strict=True)]
PEAK = LEVELS.index(max(LEVELS))
SPANS = [("train", 0, 0, 2.9), *(("step", 1, s * 0.75 + 0.05, s * 0.75 + 0.7) for s in range(3))]


def row(category, scope, stack, n_bytes, n_storages=2):
    return PeakRow(category, scope, tuple(stack), n_bytes, n_storages)


def device(times=TIMES, levels=LEVELS, name="cpu", at_peak=(), **by):
    peak = levels.index(max(levels))
    divided = {f"by_{way}": by.get(way, {}) for way in ("category", "scope", "line")}
    figures = tuple(times), tuple(levels), levels[peak], times[peak], tuple(at_peak), 0
    return DeviceTimeline(name, *figures, **divided)


def timeline(*devices, spans=(), marks=(), duration_s=3.0):
    scopes, ooms = (
        tuple(ScopeSpan(*each) for each in spans),
        tuple(OomMark(*each) for each in marks),
    )
    return TimelineReport(devices, scopes, ooms, HostTimeline((), ()), 0, duration_s, 0, ())


def page_of(drawn, command=("python", "train.py"), ended="exit code 1"):
    """The page of a recording with this timeline, as text."""
    recording = Recording(command, "", 1.0, ended, 1, timeline=drawn, seeks_leaks=False)
    with TemporaryDirectory() as folder:
        return recording.export(Path(folder, "x.html")).read_text("utf-8")


def sample_page():
    half = [level // 2 for level in LEVELS]
    rest = [level - h for level, h in zip(LEVELS, half, strict=True)]
    rows = [
        row(name, "step", ["train.py:9 in main", line], values[PEAK])
        for line, (name, values) in zip("abcde", SERIES.items(), strict=True)
    ]
    by = {"category": SERIES, "scope": {"train": half, "step": rest}, "line": {"a.py:1": LEVELS}}
    marks = [(2.6, "torch.OutOfMemoryError: tried to allocate 95.0 MiB")]
    drawn = timeline(device(at_peak=rows, **by), spans=SPANS, marks=marks)
    return page_of(drawn)


def hostile_page():
    """Hostile text wherever text can stand."""
    devices = [
        device(
            name=name,
            category={name: LEVELS},
            scope={name: LEVELS},
            at_peak=[row(name, name, [name], 5, 1)],
        )
        for name in HOSTILE
    ]
    spans, marks = [(name, 0, 0, 3) for name in HOSTILE], [(1, name) for name in HOSTILE]
    return page_of(timeline(*devices, spans=spans, marks=marks), HOSTILE)
