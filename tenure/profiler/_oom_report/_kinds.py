"""What the causes of an out-of-memory error are called, with their remedies: one table of texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from string import Formatter
from typing import Any, Literal, NamedTuple, TypeAlias

from tenure._text import counted, format_bytes

from ._facts import Facts

_MOST_CHARACTERS = 44

Cause: TypeAlias = Literal[
    "leak",
    "results",
    "cycle",
    "traceback",
    "gradients",
    "logits",
    "optimizer_state",
    "batch",
    "weights",
    "fragmentation",
    "other_process",
    "host",
    "unknown",
]


class Kind(NamedTuple):
    """One kind of cause: its `OomReport.cause`, first line and evidence, with words in braces.

    A number is followed by "B" for bytes, or by what is counted: ``{size:B}``, ``{n:tensor}``.
    """

    cause: Cause
    head: str
    evidence: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """Something that may be the cause.

    Attributes:
        kind: its row of `KINDS`.
        n_bytes: bytes that would be free without it; ``size`` in the texts.
        words: what its texts say of it.
    """

    kind: str
    n_bytes: int
    words: Mapping[str, object] = field(default_factory=dict)


class Verdict(NamedTuple):
    """A cause in words: `OomReport` has the same attributes."""

    cause: Cause
    n_bytes: int
    head: str
    evidence: tuple[str, ...]


class _Words(Formatter):
    def format_field(self, value: Any, format_spec: str) -> Any:
        if format_spec == "B":
            return format_bytes(value or 0)
        return counted(value, format_spec) if format_spec else str(value)


def shortened(name: str) -> str:
    """A name that fits into the first line."""
    return name if len(name) <= _MOST_CHARACTERS else f"{name[: _MOST_CHARACTERS - 1]}…"


def verdict_on(candidate: Candidate, facts: Facts) -> Verdict:
    """Say why a candidate is the cause."""
    kind, n_bytes = KINDS[candidate.kind], candidate.n_bytes
    share = f"{n_bytes / max(1, facts.used_bytes):.0%} of what was in use"
    words = {"size": n_bytes, "share": share, "facts": facts, **candidate.words}
    words["name"] = shortened(str(words.get("name")))
    texts = [_Words().vformat(text, (), words) for text in (kind.head, *kind.evidence)]
    return Verdict(kind.cause, n_bytes, texts[0], tuple(texts[1:]))


_BOUND = (
    "Bound it (a deque with maxlen=, an lru_cache with maxsize=), keep numbers, or remove the hook "
    "that fills it; a tenure scope around the step frees tensors that outlive it."
)
_KEEPS = "{name} keeps {n:tensor}{like}: {size:B}, {share}."
_KEEPS_GRAPHS = "{name} keeps {n:graph} of autograd alive, with {size:B} that they saved, {share}."
_BATCH = (
    "{evidence} Parameters, gradients and optimizer state take {facts.fixed_bytes:B}; nothing "
    "was found that "
    "piles up.",
    "tenure.adaptive.step(loss_of, batch) trains on it in micro-batches that fit, with the "
    "gradients of the whole; @chunked evaluates in pieces.",
)
_STATE = (
    "{evidence}; the parameters that {facts.scene.optimizer} steps take "
    "{facts.scene.optimizer_bytes:B}. A smaller batch does not "
    "help: its activations are gone by then.",
    "tenure.paging.page(model, training=True) keeps the state off the device; SGD or Adafactor "
    "have less of it; foreach=False spares the copies of a step.",
)

KINDS: dict[str, Kind] = {
    # --- what is kept without use
    "tensors": Kind("leak", "Leak: {name} keeps {n:tensor}, {size:B}. {remedy}", (_KEEPS, _BOUND)),
    "graphs": Kind(
        "leak",
        "Leak: {name} keeps {n:graph}, {size:B}. {remedy}",
        (
            _KEEPS_GRAPHS,
            "Keep a number (.item()) or .detach() in the place of a result with its graph, or call "
            "backward() on it before; a tenure scope around the step frees what outlives it.",
        ),
    ),
    "grad graphs": Kind(
        "leak",
        "Leak: {name} keeps {n:graph}, {size:B}. Set .grad to None.",
        (
            _KEEPS_GRAPHS,
            "backward(create_graph=True) leaves graphs in .grad, and each adds to the last: use "
            "torch.autograd.grad(), or zero_grad() after each step.",
        ),
    ),
    "results": Kind(
        "results",
        "Results pile up: {name} keeps {n:tensor}, {size:B}. Use chunked(collect=).",
        (
            _KEEPS,
            "Reduce each to what is needed, move it to the host with .cpu(), or let "
            "@tenure.adaptive.chunked(collect=...) gather them.",
        ),
    ),
    "result graphs": Kind(
        "results",
        "Results: {name} keeps {n:graph}, {size:B}. Use torch.no_grad().",
        (
            _KEEPS_GRAPHS,
            "Results that are only looked at need no graph: compute them under torch.no_grad(), or "
            "keep result.detach(); @tenure.adaptive.chunked(collect=...) gathers them.",
        ),
    ),
    "models": Kind(
        "leak",
        "Leak: {name} keeps {n:model}, {size:B}. Bound it, or keep them on the host or on disk.",
        (
            "{name} keeps {n:model}: {size:B}, {share}.",
            "Keep the best alone, save each with torch.save(model.state_dict()), or move it with "
            ".cpu(); its gradients and its optimizer's state go with it.",
        ),
    ),
    "optimizers": Kind(
        "leak",
        "Leak: {name} keeps {n:optimizer} with {size:B} of state. Bound it, or del the old ones.",
        (
            "{name} keeps {n:optimizer}: {size:B}, {share}.",
            "An optimizer that steps no more needs no state: keep its settings, or what you "
            "report.",
        ),
    ),
    "parts": Kind(
        "leak",
        "Leak: {name} got {n:module} while it trained, {size:B}. "
        "Bound it, or move those without use to the host.",
        (
            "{name} gets a module now and then: {size:B} with their gradients, {share}.",
            "Make them before training, drop the old ones (del), or keep them with .to('cpu').",
        ),
    ),
    "copies": Kind(
        "leak",
        "Leak: {name} keeps copies of weights or gradients, {size:B}. "
        "Bound it, or keep them on the host or on disk.",
        (
            "{name} keeps {n:tensor} with the shapes of weights: {size:B}, {share}.",
            "Save weights with torch.save(), copy with .cpu(), or keep the last and the best only.",
        ),
    ),
    "views": Kind(
        "leak",
        "Leak: {name} keeps {size:B} by {n:view} that show {shown:B}. Keep {copied} of each.",
        (
            "{name} keeps {size:B}, {share}; what it shows of it takes {shown:B}.",
            "A view, and an array of NumPy over a tensor, keep the whole storage: keep a clone() "
            "or copy() of the part that is needed.",
        ),
    ),
    "joined": Kind(
        "leak",
        "Leak: {name}{others} grows by torch.cat{at}, {size:B} after {times} times. "
        "Bound it, or move it to the host.",
        (
            "{name} was joined with more {times} times in a row: {size:B}, {share}. Each time it "
            "is "
            "there twice.",
            "Keep the last n of it, or write into a tensor that is made once; results that are "
            "only gathered belong on the host (.cpu()) or into "
            "@tenure.adaptive.chunked(collect=...).",
        ),
    ),
    "cached": Kind(
        "leak",
        "Leak: lru_cache of {name} keeps {own:result}, {size:B}. "
        "Lower its maxsize=, or call {name}.cache_clear().",
        (
            "The cache of {name} keeps {n:tensor}: {size:B}, {share}.",
            "functools.cache is an lru_cache(maxsize=None), which keeps every result and argument: "
            "use lru_cache(maxsize=8), or let the function return what is no tensor.",
        ),
    ),
    "cycled": Kind(
        "leak",
        "Leak: {name} is an itertools.cycle and keeps each batch, {size:B}. "
        "Use `while True: for batch in loader`.",
        (_KEEPS, "itertools.cycle() remembers all that it has given, to give it again."),
    ),
    "carried": Kind(
        "leak",
        "Leak: {name} carries its graph from step to step, {size:B}{retained}. {remedy}",
        (
            "The graph of {name} has saved {size:B}, {share}; it goes back over {steps:step}.",
            "Detach what goes on from step to step, or run it under torch.no_grad() where nothing "
            "is trained; retain_graph=True is then not needed.",
        ),
    ),
    "past": Kind(
        "leak",
        "Leak: {name} still holds the graph of the previous step, {size:B}. "
        "{remedy}, or del {name} first.",
        (
            "Nothing reads {name} again before it is bound anew, and its graph has saved {size:B}, "
            "{share}: two steps are in memory at once.",
            "A variable lives until it is bound anew, which is after the next forward pass has "
            "run.",
        ),
    ),
    "casts": Kind(
        "leak",
        "Leak: autocast{around} keeps {size:B} of weights that it has cast. "
        "Use autocast(cache_enabled=False), or a block for each batch.",
        (
            "About {size:B} of {facts.scene.autocast_dtype} copies of weights live until the "
            "autocast block ends.",
            "model.bfloat16() in the place of autocast has no second copy of any weight.",
        ),
    ),
    "gradients": Kind(
        "gradients",
        "Gradients: {name} keeps {size:B}{of} that no step needs. "
        "Call zero_grad(set_to_none=True) after its last step.",
        (
            "Gradients of {name} take {size:B}, {share}, and what ran reads none of them.",
            "A gradient lives until it is set to None: clear them after each step, before the next "
            "forward pass, and once more when the training of a model has ended.",
        ),
    ),
    "cycle": Kind(
        "cycle",
        "Reference cycle: {name}, {size:B} of garbage. Break it, call gc.collect(), "
        "or open a scope around it.",
        (
            "Nothing but itself refers to {name}, and what it holds: {size:B}, {share}.",
            "gc.collect() frees it now; a tenure scope around what makes it frees it at its end; a "
            "weak reference in the place of one of the links breaks it, and of an "
            "autograd.Function ctx.save_for_backward() in the place of an attribute.",
        ),
    ),
    "created graphs": Kind(
        "cycle",
        "Reference cycle: backward(create_graph=True){at} left {size:B} of gradients with graphs. "
        "Set .grad = None after it.",
        (
            "{size:B} of gradients, and of graphs that refer to their parameters: {share}.",
            "A gradient with a graph refers to its parameter, and that to the gradient: no "
            "collector sees it. Use torch.autograd.grad(), or set each .grad to None.",
        ),
    ),
    "traceback": Kind(
        "traceback",
        "Kept exception: {name} holds {size:B} by its traceback. Keep str(error), not the error.",
        (
            "{where}: {size:B}, {share}.",
            "Retry after the except block, not in it; clear what keeps the error, or its frames "
            "with traceback.clear_frames(error.__traceback__). A record of logging with exc_info=, "
            "a task and a future keep it as well.",
        ),
    ),
    "untrained": Kind(
        "batch",
        "Batch too large: {at}graphs take {size:B}, and no optimizer steps {model}. "
        "Call it under torch.no_grad().",
        _BATCH,
    ),
    # --- what runs
    "weights": Kind(
        "weights",
        "Weights too large: {at}{size:B}{facts.of_total}. Use tenure.paging.page(model).",
        (
            "Parameters and buffers take {size:B}{facts.of_total}.",
            "tenure.paging.page(model) runs it from the host's memory or from disk; weights of "
            "half the precision take half.",
        ),
    ),
    "first step": Kind(
        "optimizer_state",
        "Optimizer state: {whose} makes it in the first step. Use page(), or {less}.",
        _STATE,
    ),
    "step copies": Kind(
        "optimizer_state",
        "Optimizer state: {whose}: step() copies. Use foreach=False, or page().",
        _STATE,
    ),
    "history": Kind(
        "optimizer_state",
        "Optimizer state: {name} grows, {size:B}. Lower {setting}, or use another optimizer.",
        (
            "The lists in the state take {size:B}, {name} the most: each step adds to them.",
            "LBFGS keeps history_size= steps of the length of all its parameters, 100 of them "
            "unless told otherwise.",
        ),
    ),
    "logits": Kind(
        "logits",
        "Logits: {size:B}{of} for {width} classes. Use F.linear_cross_entropy.",
        (
            "Logits, their softmax and its gradient take {size:B} of {facts.movable_bytes:B} "
            "that the batch takes: "
            "{n:tensor} of {width} classes, and {facts.wanted_bytes:B} more was wanted.",
            "F.linear_cross_entropy makes them in pieces; tenure.adaptive.step(loss_of, batch) "
            "runs the batch in micro-batches.",
        ),
    ),
    "batch": Kind("batch", "Batch too large: {at}{what}. {remedy}", _BATCH),
    "endless": Kind(
        "batch",
        "Batch too large, or a state is never cut: {at}{what}. {remedy}",
        _BATCH,
    ),
    # --- what the numbers of the allocator, the device and the host tell
    "fragmentation": Kind(
        "fragmentation",
        "Fragmentation: {size:B} reserved, unused. Set expandable_segments:True.",
        (
            "The allocator has {facts.fragmentation[reserved_bytes]:B} and uses "
            "{facts.fragmentation[allocated_bytes]:B}; its largest free block has "
            "{largest:B}, and {facts.wanted_bytes:B} were wanted.",
            "Set PYTORCH_ALLOC_CONF=expandable_segments:True before the program starts; or call "
            "empty_cache() between phases, and keep sizes alike (pad batches to a few lengths).",
        ),
    ),
    "other_process": Kind(
        "other_process",
        "Another process has {size:B} of {facts.device}. End it, or use another device.",
        (
            "{facts.device} has {facts.total_bytes:B}: others have {size:B}, this process "
            "{own:B}, and {facts.free_bytes:B} is free.",
            "nvidia-smi (or your system's tool) lists them; a notebook that is still open is one.",
        ),
    ),
    "host": Kind(
        "host",
        "Host memory: {size:B} is no tensors (NumPy, Python). Free it first.",
        (
            "The process has {facts.host[rss_bytes]:B}{limit}; tensors take {facts.used_bytes:B} "
            "of it, and since recording began "
            "{size:B} of other objects came.",
            "Arrays, lists of numbers and data sets in memory count here: read them in pieces or "
            "map them (numpy.memmap, torch.load(mmap=True)).",
        ),
    ),
    "unknown": Kind("unknown", "Out of memory; too little was seen to tell why.", ()),
}
