"""Where each measured number of the docs comes from: page, words, table and row.

A number is a quote of its row when one of the row's numbers, rounded as the page rounds, is it.
"""

from __future__ import annotations

_STEP = "step in micro-batches / by hand: "
_IN_BUDGET = "a training step in a memory_budget: transformer of 4 layers of 512"
_BARE_MODE = "toma's benchmark, (128, 16, 16): a bare mode / native"
_SIMULATED = "on the simulated accelerator"
_ON_GPU = "cuda/h100-torch2.11"
_COMPILED = "peak of a step compiled by inductor / predicted: "

# (page, quantity as it stands there): (results, row)
QUOTED = {
    ("docs/adaptive.md", "7 µs"): ("costs", "an operation in a memory_budget"),
    ("docs/adaptive.md", "1.06 times"): ("costs", _IN_BUDGET),
    ("docs/lazy.md", "470 µs"): ("costs", "a lazy step of three layers"),
    ("docs/performance.md", "1.00 times"): (
        "scopes",
        "training step in a scope / plain: transformer",
    ),
    ("docs/performance.md", "1.04 times"): (
        "scopes",
        "training step in a scope / plain: ResNet-18",
    ),
    ("docs/performance.md", "1.17 times"): ("scopes", "tracked op / bare mode: a + b (8 floats)"),
    ("docs/performance.md", "1.9 times"): ("adaptive", _BARE_MODE),
    ("docs/performance.md", "1.01 times"): ("adaptive", f"{_STEP}transformer, 8 in 4"),
    ("docs/performance.md", "1.05 times"): ("adaptive", f"{_STEP}ResNet-18 (frozen norms), 8 in 4"),
    ("docs/performance.md", "2.1 times"): (
        "adaptive",
        "step in 4 micro-batches of 0.5 ms / by hand",
    ),
    ("docs/performance.md", "1.06 times"): ("costs", _IN_BUDGET),
    ("docs/performance.md", "1.02 times"): ("record_oom", "4-layer transformer step (d=512)"),
    ("docs/performance.md", "1.08 times"): (
        "timeline",
        "training step of a GPT of 4 blocks of 512, recorded / plain",
    ),
    ("docs/performance.md", "1.22 times"): (
        "profiler",
        "training step of a small GPT / plain: line profiler, step and forward",
    ),
    ("docs/performance.md", "1.59 times"): (
        "profiler",
        "step of a GPT, every line profiled / plain: in the region",
    ),
    ("docs/performance.md", "2.5 µs"): ("costs", "a survivor let go"),
    ("docs/performance.md", "1.6 times"): (
        "ranks",
        "2 processes: a vote / an all_reduce of one number by gloo",
    ),
    ("docs/performance.md", "1.4 times"): (
        "ranks",
        "2 processes: step() that fits / backward() of DistributedDataParallel",
    ),
    ("docs/performance.md", "10.1 times"): (
        "profiler",
        "profiled / plain: a + b, each on a profiled line, beside the loop's own",
    ),
    ("docs/performance.md", "13.7 times"): ("timeline", "a + b recorded / plain"),
    ("docs/performance.md", "2.5 times"): ("record_oom", "add of 8 floats (informs)"),
    ("docs/performance.md", "87 ms"): ("reports", "report / a scan for tensors"),
    ("docs/performance.md", "227 ms"): ("reports", "holders / gc.get_referrers"),
    ("docs/performance.md", "58 ms"): ("profiler", "enable and disable"),
    ("docs/performance.md", "102 ms"): ("timeline", "begin and end a recording"),
    ("docs/performance.md", "24 µs"): ("paging_cost", "a module of 16 blocks, all resident"),
    ("docs/performance.md", "108 µs"): ("paging_cost", "a module of 16 blocks, half resident"),
    ("docs/performance.md", "2.0 times"): (
        "paging_disk",
        "paged from the page cache / all in memory: a few rows",
    ),
    ("docs/performance.md", "7 µs"): ("costs", "an operation in a memory_budget"),
    ("docs/performance.md", "470 µs"): ("costs", "a lazy step of three layers"),
    ("docs/performance.md", "0.1 µs"): ("costs", "the end of a block with a survivor, each module"),
    ("docs/performance.md", "125 µs"): ("costs", f"an operation {_SIMULATED}"),
    ("docs/performance.md", "2 µs"): ("costs", f"a view {_SIMULATED}"),
    ("benchmarks/results/README.md", "1.9 times"): ("adaptive", _BARE_MODE),
    ("docs/compiled.md", "0.55 times"): ("compiled", f"{_COMPILED}CNN"),
    ("docs/reliability.md", "55 GB/s"): (_ON_GPU, "share_of_the_link: plain_gb_per_s"),
    ("docs/reliability.md", "114 µs"): (_ON_GPU, "host_time_per_layer: all_stay_us"),
    ("docs/reliability.md", "280 µs"): (_ON_GPU, "host_time_per_layer: half_pass_us"),
    ("docs/reliability.md", "15 µs"): (_ON_GPU, "host_time_per_layer: plain_us"),
    ("docs/reliability.md", "1.3 times"): (_ON_GPU, "scope_overhead: training_ratio"),
    ("docs/reliability.md", "1.7 times"): (_ON_GPU, "scope_overhead: inference_ratio"),
}

# Numbers that nobody measured: what a user sets, what torch documents, what a page computes.
NOT_MEASURED = {
    # rates of the simulated device
    "benchmarks/results/README.md": {"24 GB/s", "8 µs", "6 µs", "8 GB/s"},
}
