"""A report of every kind as programs make them: long names and paths, many rows, views, markup.

By private names where the programs that give such reports would take minutes.
"""

# ruff: noqa: E501 - lines as long as those of the programs that make them

import torch

from tenure import LeakRecord, LeakReport, adaptive, paging
from tenure import profiler as p
from tenure._cli._cell import CellReport
from tenure._cli._fitting import Answer, MicroBatch
from tenure.profiler._lines._display import RecordsDisplay, Section
from tenure.profiler._owners import StorageEntry

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
SITE = "experiments/pretraining/models/transformer/attention_with_rotary_embeddings.py:1234"
FAR = "/opt/conda/envs/research/lib/python3.11/site-packages/torch/nn/modules/transformer.py:12"
LAYER = "encoder.layers.{}.self_attention.output_projection.weight"
HOLDER = "Trainer.fit.<locals>.callbacks[3].validation_history['<script>loss'][{}]"
SAVED = "ScaledDotProductEfficientAttentionBackward0.logsumexp"
VIEW = "Trainer.fit.<locals>.last_hidden_state_of_first_token"


def _row(i, name=LAYER, category="parameters", n_bytes=None, owner=None, **facts):
    shape = (3072, 1024 - i)
    n_bytes = 4 * 3072 * (1024 - i) if n_bytes is None else n_bytes
    facts = {"created_at": SITE if i % 3 else FAR} | facts
    return p.TensorRow(
        name.format(i), category, shape, "float32", "cuda:0", n_bytes, owner, **facts
    )


PARAMETERS = tuple(map(_row, range(30)))
OTHERS = (
    _row(0, name="DecoderLayer0.norm.weight+DecoderLayer1.norm.weight", created_at=None),
    _row(1, name=HOLDER.format(0), category="other tensors", n_bytes=2**30),
    _row(2, name=SAVED, category="saved for backward", graph=HOLDER.format(1)),
)
A_VIEW = _row(3, name=VIEW, category="other tensors", n_bytes=0, owner=HOLDER.format(0))
ROWS = (*PARAMETERS, *OTHERS, A_VIEW)
_SUMS = {
    "parameters": 2**28,
    "gradients": 2**20,
    "saved for backward": 2**21,
    "other tensors": 2**30,
}
DEVICE = p.DeviceReport("cuda:0", ROWS, _SUMS, 2**31, True, 2**32, 2**33, 2**20, 2**21)
EMPTY = p.DeviceReport("cpu", (), dict.fromkeys(_SUMS, 0), 0)
MEMORY = p.MemReport((DEVICE, EMPTY))
FINDINGS = (
    p.Finding("growth", "x", f"{HOLDER.format('…')} grew by 100 tensors, 1.0 GiB", 2**30),
    p.Finding("view", VIEW, f"{VIEW} shows 4 B and keeps 1.0 GiB alive", 2**30),
)


def _leak(i, n_bytes=2**20, holders=None, graph=""):
    holders = holders or (HOLDER.format(i), f"{__name__}.REGISTRY['{VIEW}']")
    site = SITE if i % 2 else FAR
    return LeakRecord(
        (64, 512, 1024), torch.float32, CUDA, n_bytes, site, holders, "container", graph
    )


_IN_A_GRAPH = {"graph": HOLDER.format(0), "holders": (f"{SAVED} in the graph of {HOLDER}",)}
SCOPE = "<DisposeScope 'one step of the training loop'>"
LEAKS = LeakReport(
    (*(_leak(i, (i + 1) * 2**20) for i in range(25)), *(_leak(i, **_IN_A_GRAPH) for i in range(3))),
    scope=SCOPE,
)
STACK = (
    "experiments/pretraining/train.py:41 in main",
    f"{FAR} in forward",
    f"{SITE} in scaled_dot_product_attention_of_all_heads",
)


def _peak(i):
    category = ("activations", "gradients", "optimizer state", "temporary or unexplained")[i % 4]
    scope = SCOPE if i % 2 else "outside of scopes"
    stack = (*STACK[: i % 3], f"experiments/pretraining/models/layer_{i}.py:{i} in forward")
    return p.PeakRow(category, scope, stack if i % 5 else (), (40 - i) * 2**20, i)


AT_PEAK = tuple(map(_peak, range(40)))
PEAK = sum(row.n_bytes for row in AT_PEAK)
TIMES = tuple(i / 10 for i in range(50))
LIVE = tuple(min(PEAK, (i + 1) * PEAK // 40) for i in range(50))
BANDS = {
    "activations": tuple(n * 2 // 3 for n in LIVE),
    "temporary or unexplained": tuple(n - n * 2 // 3 for n in LIVE),
}
DEVICE_TIMELINE = p.DeviceTimeline(
    "cuda:0", TIMES, LIVE, PEAK, 3.9, AT_PEAK, 0, BANDS, {"outside of scopes": LIVE}, {SITE: LIVE}
)
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.1 GiB of which 1.2 GiB is free."
TIMELINE = p.TimelineReport(
    (DEVICE_TIMELINE,),
    (p.ScopeSpan(SCOPE, 0, 0.0, 4.0),),
    (p.OomMark(3.9, OUT_OF_MEMORY),),
    p.HostTimeline((0.0,), (2**33,)),
    12345,
    5.0,
    5,
    ("of 20000 storages, those of the 500 largest places are told apart; the others are one row",),
)
_OF_ALLOCATOR = "allocated_bytes", "reserved_bytes", "unused_bytes", "largest_free_bytes"
OOM = p.OomReport(
    "leak",
    f"A leak: {HOLDER.format('…')} keeps 1.0 GiB in 100 tensors; keep .detach() or .item() of what is kept.",
    (f"100 tensors of {HOLDER.format('…')} hang on graphs of autograd, with 900 MiB.",),
    f"torch.OutOfMemoryError: {OUT_OF_MEMORY}",
    f"{SITE} in scaled_dot_product_attention_of_all_heads",
    "cuda:0",
    2**34,
    2**36,
    2**30,
    _SUMS,
    (
        p.OomLine(HOLDER.format("…"), 2**30, 100),
        p.OomLine(VIEW, 2**20, 1, "float32[64, 512, 1024] on cuda:0"),
    ),
    dict(zip(_OF_ALLOCATOR, (2**35, 2**36, 2**35, 2**20), strict=True)),
    {"rss_bytes": 2**33, "free_bytes": 2**34, "limit_bytes": 2**35, "own_limit_bytes": 2**35},
    notes=("Where <b>tensors</b> were made is not known: open a scope with capture=.",),
)
SOURCE = [
    "def scaled_dot_product_attention_of_all_heads(self, queries, keys, values, attention='<script>'):",
    "    scores = torch.matmul(queries, keys.transpose(-2, -1)) / math.sqrt(queries.size(-1)) + self.bias",
    "    return torch.matmul(self.dropout(scores.softmax(-1)), values).transpose(1, 2).reshape(b, t, -1)",
]
FILE = SITE.rpartition(":")[0]


def _line(i):
    figures = 300, 2**30 * i, 2**29, 2**30 + i, CUDA, False, False
    return p.LineRecord("attention", 1234 + i, *figures, SOURCE[i], FILE)


LINES = RecordsDisplay(
    (
        Section(
            f"MultiHeadAttention.scaled_dot_product_attention_of_all_heads, {FILE}:1234, cuda:0",
            tuple(
                (1234 + i, text.removeprefix("    "), _line(i) if i else None)
                for i, text in enumerate(SOURCE)
            ),
        ),
    ),
    ("hits", "alloc", "freed", "net", "peak"),
)


def _recording(**changed):
    command = "python -m experiments.pretraining.train --config configs/large.yaml --run <script>"
    facts = {
        "command": tuple(command.split()),
        "began_at": "2026-01-01T00:00:00+00:00",
        "duration_s": 4000.0,
        "ended": f"torch.OutOfMemoryError: {OUT_OF_MEMORY}",
        "exit_code": 1,
        "versions": {"Python": "3.11.7", "torch": "2.13.0", "tenure": "1.0"},
        "peaks": {"cuda:0": 2**31, "cpu": 2**20},
        "leaks": (LEAKS,),
        "growth": (
            p.Growth(HOLDER.format("…"), 1, 100, 2**20, 2**27, 1, 99, 2**28),
            p.Growth(VIEW, 1, 9, 4, 36, 1, 9),
        ),
        "lines": LINES,
        "memory": MEMORY,
        "timeline": TIMELINE,
        "oom": OOM,
        "notes": ("lines of <b>MultiHeadAttention</b>.forward were not seen: it is compiled",),
    }
    return p.Recording(**(facts | changed))


RUN = _recording()
_OF_LITTLE = {
    "command": ("python", "train.py"),
    "ended": "exit code 0",
    "exit_code": 0,
    "leaks": (),
    "growth": (),
    "lines": None,
    "oom": None,
    "timeline": None,
    "notes": (),
}
_SHORT_MEMORY = p.DeviceReport("cuda:0", ROWS[4:], {"parameters": 2**20}, 2**30, True)
SHORT = _recording(**_OF_LITTLE, memory=p.MemReport((_SHORT_MEMORY,)))
DIFF = p.SnapshotDiff(2**30, ROWS[:25], ROWS[25:-1], ((PARAMETERS[0], PARAMETERS[1]),), FINDINGS)


PEAK_REPORT = adaptive.PeakReport(
    2**33, 2**31, {"parameters": 2**31, "activations": 2**32, "temporaries": 2**31}, "backward",
    "aten._scaled_dot_product_efficient_attention_backward.default", f"{LAYER.format(3)} ({SITE})",
    "cuda:0", True, (f"what <b> {HOLDER.format(3)} selects is taken to be everything, at {SITE}",),
    allocated_bytes=2**33 + 2**20, reserved_bytes=2**33 + 2**24, allowance_bytes=2**20,
    budget_bytes=2**32, later_peak_bytes=2**34,
)  # fmt: skip


REPORTS = {
    "memory": MEMORY,
    "no memory": p.MemReport((EMPTY,)),
    "snapshot": p.Snapshot((StorageEntry(ROWS[0], 4),), MEMORY),
    "difference": DIFF,
    "leaks": LEAKS,
    "no leaks": LeakReport((), scope="s"),
    "saved": p.SavedReport(
        tuple(
            p.SavedRecord((64, 512, 1024 - i), torch.float32, CUDA, 2**27 - i,
            (SAVED, "AccumulateGrad.variable"), SITE, bool(i % 2), not i % 2)
            for i in range(30)
        ), 400,
    ),
    "holders": p.HolderList((HOLDER.format(1), VIEW), n_references=3, n_unexplained=1, tensor=f"float32[64, 512] on cuda:0, 1.0 GiB, created at {SITE}"),
    "no holders": p.HolderList((), tensor="float32[3] on cpu, 12 B"),
    "lines": LINES,
    "no lines": p.LineProfiler().display(),
    "timeline": TIMELINE,
    "empty timeline": p.TimelineReport((), (), (), p.HostTimeline((), ()), 0, 0.0, 5, ()),
    "out of memory": OOM,
    "recording": RUN,
    "short recording": SHORT,
    "recordings of ranks": p.RecordedRanks.of([_recording(rank=1), _recording(rank=0)]),
    "difference of recordings": p.RecordingDiff.of(SHORT, RUN),
    "cell": CellReport(RUN, DIFF),
    "tree": RUN.tree(),
    "recorded leaks": RUN.leaks_found(),
    "no recorded leaks": SHORT.leaks_found(),
    "courtesy": p.CourtesyReport(
        2**30, 100, 200,
        (p.Stay("float32[64, 512, 1024] on cuda:0, 128.0 MiB", 2**27, "it is shared with another process"),),
    ),
    "no courtesy": p.CourtesyReport(0, 0, 0),
    "paging": paging.PagingReport(
        3, 0.25, 0.05, 0.2, 2**34, 25e9, 12, 245, 0.9, "link", 2**34, 2**32, 2**31, 2**33,
        2**33 + 2**21, 2**28, 2**35, 2**30,
    ),
    "split": adaptive.SplitReport(
        (8,) * 40, 1e-5,
        (adaptive.SplitDifference("module", f"{LAYER.format(3)} (BatchNorm1d)", 0.5), adaptive.SplitDifference("gradient", LAYER.format(9), 0.25)),
    ),
    "peak": PEAK_REPORT,
    "answer": Answer(PEAK_REPORT, MicroBatch(4, 16, False, 2**33)),
    "plan": adaptive.Plan(
        4, 10, (4, 4, 2), 2**33, 2**33, 2**34, 2**31, {"parameters": 2**31, "gradients": 2**30, "optimizer state": 2**32, "activations": 2**33, "temporaries": 5}, "cuda:0", True,
        (f"what {HOLDER.format(3)} selects is taken to be everything, at {SITE}",),
    ),
}  # fmt: skip
