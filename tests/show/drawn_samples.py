"""A training run as drawings: three steps, a pile that grows, memory that runs out."""

from tenure._show import bands, drawn_page, flame, grid

MIB = 2**20
# Not one of them may become markup, reach out of its cell, or hide what stands beside it.
HOSTILE = (
    "</script><script>window.broken = 1</script>",
    "<img src=x onerror='window.broken = 1'>",
    '"\' onmouseover="window.broken = 1" x=\'',
    "<!-- ]]> &amp; &#0; %s ${window.broken = 1}",
    "\u202eright to left\u202d \u05e9\u05dc\u05d5\u05dd",
    "line\nbreak\ttab\0nul \ud800 \u2028\u2029",
    "__proto__",
    "very" * 400 + "long",
)
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
SPANS = [
    ("train", 0, 0, 2.9),
    *(("step", 1, s * 0.75 + 0.05, s * 0.75 + 0.7) for s in range(3)),
]


def chart(title="cpu: memory in use", **changes):
    half = [level // 2 for level in LEVELS]
    rest = [level - h for level, h in zip(LEVELS, half, strict=True)]
    ways = {"category": SERIES, "scope": {"train": half, "step": rest}, "line": {"a.py:1": LEVELS}}
    marks = [(2.6, "torch.OutOfMemoryError: tried to allocate 95.0 MiB")]
    given = {"ways": ways, "end_s": 3.0, "spans": SPANS, "marks": marks, **changes}
    return bands(title, TIMES, LEVELS, **given)


def flames(rows=None):
    rows = rows or [
        (
            {"category": [name], "scope": ["step"], "line": ["train.py:9 in main", line]},
            values[PEAK],
            2,
        )
        for line, (name, values) in zip("abcde", SERIES.items(), strict=True)
    ]
    orders = (("scope", "line", "category"), ("category", "line"))
    return flame("cpu after 2.50 s", rows, orders, "category", "storages")


def lines(n=30):
    columns = {
        "line": "count",
        "code": "code",
        "allocated": "bytes",
        "net": "bytes",
        "held by": "lines",
    }
    rows = [
        (
            i,
            f"    h = block_{i}(h)",
            None if i == 3 else (i * 7 % 11) * MIB,
            (-i * MIB, f"~ -{i}.0 MiB"),
            [f"model.blocks[{k}]" for k in range(i % 6)],
        )
        for i in range(n)
    ]
    return grid("forward, model.py:0, cpu", columns, rows, note="A note.")


def sections():
    return [
        ("Memory over time", "How many bytes were in use.", [chart()]),
        ("At the peak", "Whose the memory was.", [flames()]),
        ("Source lines", "What each line allocated.", [lines()]),
    ]


def sample_page():
    facts = [("peak of cpu", "166.0 MiB", "after 2.50 s", False), ("leaked", "30.0 MiB", "", True)]
    told = "exit code 1 after 3.0 s"
    return drawn_page("python train.py", sections(), told=told, facts=facts, otherwise="<p>x</p>")


def hostile_page():
    """Hostile text wherever text can stand."""
    section = []
    for name in HOSTILE:
        ways = {name: {name: LEVELS}, "scope": {name: LEVELS}}
        columns = {f"{name} {kind}": kind for kind in ("text", "name", "code", "place", "lines")}
        columns[f"{name} bytes"] = "bytes"
        cells = (name, name, name, name, [name] * 5, (1, name))
        rows = [({name: [name], "category": [name]}, 5, 1)]
        drawings = [
            chart(name, ways=ways, spans=[(name, 0, 0, 3)], marks=[(1, name)]),
            flame(name, rows, [["category", name], [name]], "category", name),
            grid(name, columns, [cells] * 7, colour=name, note=name),
        ]
        section.append((name, name, drawings))
    facts = [(name, name, name, False) for name in HOSTILE]
    return drawn_page("".join(HOSTILE), section, told=HOSTILE[0], facts=facts)
