"""Where each measured number of the docs comes from: page, words, table and row.

A number is a quote of its row when one of the row's numbers, rounded as the page rounds, is it.
"""

# quantity as it stands on a page: results, and their row
PAGES = {
    "docs/adaptive.md": {
        "7 µs": "costs: an operation in a memory_budget",
        "1.06 times": "costs: a training step in a memory_budget: transformer of 4 layers of 512",
    },
    "docs/lazy.md": {
        "470 µs": "costs: a lazy step of three layers",
    },
    "docs/performance.md": {
        "1.00 times": "scopes: training step in a scope / plain: transformer",
        "1.04 times": "scopes: training step in a scope / plain: ResNet-18",
        "1.17 times": "scopes: tracked op / bare mode: a + b (8 floats)",
        "1.9 times": "adaptive: toma's benchmark, (128, 16, 16): a bare mode / native",
        "1.01 times": "adaptive: step in micro-batches / by hand: transformer, 8 in 4",
        "1.05 times": "adaptive: step in micro-batches / by hand: ResNet-18 (frozen norms), 8 in 4",
        "2.1 times": "adaptive: step in 4 micro-batches of 0.5 ms / by hand",
        "1.06 times": "costs: a training step in a memory_budget: transformer of 4 layers of 512",
        "1.02 times": "record_oom: 4-layer transformer step (d=512)",
        "1.08 times": "timeline: training step of a GPT of 4 blocks of 512, recorded / plain",
        "1.22 times": "profiler: "
        "training step of a small GPT / plain: line profiler, step and forward",
        "1.59 times": "profiler: step of a GPT, every line profiled / plain: in the region",
        "2.5 µs": "costs: a survivor let go",
        "1.6 times": "ranks: 2 processes: a vote / an all_reduce of one number by gloo",
        "1.4 times": "ranks: 2 processes: step() that fits / backward() of DistributedDataParallel",
        "10.1 times": "profiler: "
        "profiled / plain: a + b, each on a profiled line, beside the loop's own",
        "13.7 times": "timeline: a + b recorded / plain",
        "2.5 times": "record_oom: add of 8 floats (informs)",
        "87 ms": "reports: report / a scan for tensors",
        "227 ms": "reports: holders / gc.get_referrers",
        "24 µs": "paging_cost: a module of 16 blocks, all resident",
        "108 µs": "paging_cost: a module of 16 blocks, half resident",
        "2.0 times": "paging_disk: paged from the page cache / all in memory: a few rows",
    },
    "benchmarks/results/README.md": {
        "1.9 times": "adaptive: toma's benchmark, (128, 16, 16): a bare mode / native",
    },
    "docs/compiled.md": {
        "0.55 times": "compiled: peak of a step compiled by inductor / predicted: CNN",
    },
    "docs/reliability.md": {
        "55 GB/s": "cuda/h100-torch2.11: share_of_the_link: plain_gb_per_s",
        "114 µs": "cuda/h100-torch2.11: host_time_per_layer: all_stay_us",
        "280 µs": "cuda/h100-torch2.11: host_time_per_layer: half_pass_us",
        "15 µs": "cuda/h100-torch2.11: host_time_per_layer: plain_us",
        "1.3 times": "cuda/h100-torch2.11: scope_overhead: training_ratio",
        "1.7 times": "cuda/h100-torch2.11: scope_overhead: inference_ratio",
    },
}
QUOTED = {
    (page, quantity): source.split(": ", 1)
    for page, rows in PAGES.items()
    for quantity, source in rows.items()
}

# Numbers that nobody measured: what a user sets, what torch documents, what a page computes.
NOT_MEASURED = {
    # rates of the simulated device
    "benchmarks/results/README.md": {"24 GB/s", "8 µs", "6 µs", "8 GB/s"},
}
