"""Which cause an out-of-memory error has, and its remedy: rules by bytes, the certain ones first.

What is of no use any more is the cause where it is much of what could be free: without it the same
work would have fitted, as it did when the program began. Otherwise it is what ran.
"""

from __future__ import annotations

from collections.abc import Iterator

from tenure._text import counted, describe_elements, format_bytes

from .._owners import BUFFERS, GRADIENTS, OPTIMIZER_STATE, OTHERS, PARAMETERS, SAVED
from ._facts import Facts
from ._piles import Pile, piles_in, runs_again
from ._verdict import Verdict, short

_FIXED = (PARAMETERS, BUFFERS, GRADIENTS, OPTIMIZER_STATE)
# Of what the work itself takes: a smaller pile is beside the point.
_MUCH = 0.25
# The same of a pile, where what ran has a cause of its own.
_MOST = 0.45
# A layer whose output is this much wider than its input makes logits, and no hidden state: those
# of transformers are four times as wide at the most.
_WIDENING = 4
_FEWEST_CLASSES = 256
_LOSS_NODES = ("LogSoftmax", "NllLoss", "CrossEntropy", "Softmax")


def judge(facts: Facts) -> Verdict:
    """The cause; `unknown` where nothing was seen that could be one."""
    certain = _fragmentation(facts) or _other_process(facts)
    if certain is not None:
        return certain
    piles = [*facts.models, *piles_in(facts.entries, facts.scene)]
    pile = max(piles, key=lambda pile: pile.n_bytes, default=None)
    phase = _building(facts) or _optimizer(facts) or _logits(facts)
    if pile is not None and _explains(pile, facts, phase):
        return _of_pile(pile, facts)
    return phase or _host(facts) or _weights(facts) or _batch(facts)


def _explains(pile: Pile, facts: Facts, phase: Verdict | None) -> bool:
    """Whether without a pile there would have been room."""
    lacking = facts.wanted_bytes - (facts.free_bytes or 0)
    if facts.free_bytes is not None and pile.n_bytes < lacking:
        return False
    if facts.total_bytes is not None and facts.wanted_bytes > facts.total_bytes:
        return False
    all_bytes = facts.used_bytes + facts.wanted_bytes
    # of a phase that fills memory for good, all of it counts
    if phase is not None and phase.cause in ("weights", "optimizer_state"):
        return pile.n_bytes >= _MOST * max(all_bytes, phase.n_bytes)
    of_work = all_bytes if pile.are_models else all_bytes - facts.bytes_of(*_FIXED)
    share = pile.n_bytes / max(1, of_work)
    return share >= (_MUCH if phase is None else _MOST)


# --- what is certain by the numbers of the allocator


def _fragmentation(facts: Facts) -> Verdict | None:
    counters = facts.counters
    if counters is None or not facts.wanted_bytes:
        return None
    unused = counters.reserved - counters.allocated
    largest = facts.cached.largest_free_bytes if facts.cached is not None else 0
    enough = unused + (facts.free_bytes or 0) >= facts.wanted_bytes
    if not enough or unused < counters.reserved // 10 or largest >= facts.wanted_bytes:
        return None
    return Verdict(
        "fragmentation",
        unused,
        f"Fragmentation: {format_bytes(unused)} reserved, unused. Set expandable_segments:True.",
        (
            f"The allocator has {format_bytes(counters.reserved)} and uses "
            f"{format_bytes(counters.allocated)}; its largest free block has "
            f"{format_bytes(largest)}, and {format_bytes(facts.wanted_bytes)} were wanted.",
            "Set PYTORCH_ALLOC_CONF=expandable_segments:True before the program starts; or call "
            "empty_cache() between phases, and keep sizes alike (pad batches to a few lengths).",
        ),
    )


def _other_process(facts: Facts) -> Verdict | None:
    total, others = facts.total_bytes or 0, facts.others_bytes
    own = max(facts.used_bytes, total - others - (facts.free_bytes or 0))
    if not total or others < total // 10 or others < own:
        return None
    return Verdict(
        "other_process",
        others,
        f"Another process has {format_bytes(others)} of {facts.device}. End it, or use another "
        "device.",
        (
            f"{facts.device} has {format_bytes(total)}: others have {format_bytes(others)}, this "
            f"process {format_bytes(own)}, and {format_bytes(facts.free_bytes or 0)} is free.",
            "nvidia-smi (or your system's tool) lists them; a notebook that is still open is one.",
        ),
    )


# --- what is of no use any more


def _of_pile(pile: Pile, facts: Facts) -> Verdict:
    # what grows beside training is no result of it: nothing can be run in pieces there
    if pile.kind == "results" and not pile.graph_bytes and _trains(facts):
        pile.kind = "leak"
    share = f"{pile.n_bytes / max(1, facts.used_bytes):.0%} of what was in use"
    size = format_bytes(pile.n_bytes)
    if pile.kind == "cycle":
        return Verdict(
            "cycle",
            pile.n_bytes,
            f"Reference cycle: {size} of garbage waits. Break it, or open a scope around it.",
            (
                f"Nothing but itself refers to {pile.place}, and what it holds: {size}, {share}.",
                "gc.collect() frees it now; a tenure scope around what makes it frees it at its "
                "end; a weak reference in the place of one of the links breaks it.",
            ),
        )
    if pile.kind == "traceback":
        return Verdict(
            "traceback",
            pile.n_bytes,
            f"Kept exception: its traceback holds {size}. Keep str(error), not the error.",
            (
                f"{pile.place}: {size}, {share}.",
                "Retry after the except block, not in it; clear what keeps the error, or its "
                "frames with traceback.clear_frames(error.__traceback__).",
            ),
        )
    return _of_graphs(pile, size, share) if pile.graph_bytes else _of_tensors(pile, size, share)


def _of_graphs(pile: Pile, size: str, share: str) -> Verdict:
    n = counted(pile.n, "graph")
    name = short(pile.place)
    evidence = [f"{pile.place} keeps {n} of autograd alive, with {size} that they saved, {share}."]
    if pile.kind == "results":
        evidence.append(
            "Results that are only looked at need no graph: compute them under torch.no_grad(), "
            "or keep result.detach(); @tenure.adaptive.chunked(collect=...) gathers them."
        )
        remedy = "Use torch.no_grad()."
        return Verdict("results", pile.n_bytes, _head("Results", name, n, size, remedy),
                       tuple(evidence))  # fmt: skip
    if pile.place.endswith(".grad"):
        remedy = "Set .grad to None."
        evidence.append(
            "backward(create_graph=True) leaves graphs in .grad, and each adds to the last: use "
            "torch.autograd.grad(), or zero_grad() after each step."
        )
        return Verdict("leak", pile.n_bytes, _head("Leak", name, n, size, remedy), tuple(evidence))
    remedy = "Keep loss.item()." if pile.is_scalar else "Keep .detach() of it."
    evidence.append(
        "Keep loss.item() or loss.detach() in the place of the loss, or call backward() on it "
        "before; a tenure scope around the step lets go of what outlives it."
    )
    return Verdict("leak", pile.n_bytes, _head("Leak", name, n, size, remedy), tuple(evidence))


def _of_tensors(pile: Pile, size: str, share: str) -> Verdict:
    n = counted(pile.n, "model" if pile.are_models else "tensor")
    name = short(pile.place)
    like = ""
    if pile.example is not None:
        like = f", such as {describe_elements(pile.example.dtype, pile.example.shape)}"
    evidence = f"{pile.place} keeps {n}{like}: {size}, {share}."
    if pile.kind == "results":
        return Verdict(
            "results",
            pile.n_bytes,
            _head("Results pile up", name, n, size, "Use chunked(collect=)."),
            (
                evidence,
                "Reduce each to what is needed, move it to the host with .cpu(), or let "
                "@tenure.adaptive.chunked(collect=...) gather them.",
            ),
        )
    return Verdict(
        "leak",
        pile.n_bytes,
        _head("Leak", name, n, size, "Bound it."),
        (
            evidence,
            "Bound it (a deque with maxlen=, an lru_cache with maxsize=), keep numbers, or remove "
            "the hook that fills it; a tenure scope around the step lets go of what outlives it.",
        ),
    )


def _head(label: str, name: str, n: str, size: str, remedy: str) -> str:
    return f"{label}: {name} keeps {n}, {size}. {remedy}"


# --- what ran


def _building(facts: Facts) -> Verdict | None:
    scene = facts.scene
    if not scene.is_building or scene.is_forward:
        return None
    weights = max(scene.building_bytes, facts.bytes_of(PARAMETERS, BUFFERS) + facts.wanted_bytes)
    return _too_large(facts, weights)


def _too_large(facts: Facts, weights: int) -> Verdict:
    of_total = f" of {format_bytes(facts.total_bytes)}" if facts.total_bytes else ""
    return Verdict(
        "weights",
        weights,
        f"Weights too large: {format_bytes(weights)}{of_total}. Use tenure.paging.page(model).",
        (
            f"Parameters and buffers take {format_bytes(weights)}, and {facts.device} has "
            f"{format_bytes(facts.total_bytes or 0)}."
            if facts.total_bytes
            else f"Parameters and buffers take {format_bytes(weights)}.",
            "tenure.paging.page(model) runs it from the host's memory or from disk; weights of "
            "half the precision take half.",
        ),
    )


def _optimizer(facts: Facts) -> Verdict | None:
    scene = facts.scene
    if not scene.optimizer:
        return None
    state = facts.bytes_of(OPTIMIZER_STATE)
    n_bytes = max(state + facts.wanted_bytes, scene.optimizer_bytes)
    model = format_bytes(scene.optimizer_bytes)
    if scene.is_first_step:
        head = f"Optimizer state: {scene.optimizer}'s first step makes it. Use page(), or less of"
        head = f"{head} it (SGD)."
        told = f"The state is made in the first step, of which {format_bytes(state)} was there"
    else:
        head = f"Optimizer state: {scene.optimizer}.step() copies. Use foreach=False, or page()."
        told = f"A step on many tensors at once takes copies of them beside {format_bytes(state)}"
    return Verdict(
        "optimizer_state",
        n_bytes,
        head,
        (
            f"{told}; the parameters that {scene.optimizer} steps take {model}. A smaller batch "
            "does not help: its activations are gone by then.",
            "tenure.paging.page(model, training=True) keeps the state off the device; SGD or "
            "Adafactor have less of it; foreach=False spares the copies of a step.",
        ),
    )


def _logits(facts: Facts) -> Verdict | None:
    classes = set(_numbers_of_classes(facts))
    scene = facts.scene
    if not classes:
        return None
    rows = [
        e.owner
        for e in facts.entries
        if e.owner.category in (OTHERS, SAVED) and e.owner.shape and e.owner.shape[-1] in classes
    ]
    # in a backward pass nothing else is as wide
    of_loss = (
        scene.is_loss or scene.is_backward or any(row.name.startswith(_LOSS_NODES) for row in rows)
    )
    in_head = scene.is_forward and scene.out_features in classes
    if not of_loss and not in_head:
        return None
    is_wanted = scene.is_loss or in_head or scene.is_backward
    n_bytes = sum(row.n_bytes for row in rows) + (facts.wanted_bytes if is_wanted else 0)
    movable = facts.used_bytes + facts.wanted_bytes - facts.bytes_of(*_FIXED)
    if n_bytes < 0.4 * movable:
        return None
    width = max(row.shape[-1] for row in rows) if rows else scene.out_features
    return Verdict(
        "logits",
        n_bytes,
        f"Logits: {format_bytes(n_bytes)} for {width} classes. Use F.linear_cross_entropy.",
        (
            f"Logits, their softmax and its gradient take {format_bytes(n_bytes)} of "
            f"{format_bytes(movable)} that the batch takes: {counted(len(rows), 'tensor')} of "
            f"{width} classes, and {format_bytes(facts.wanted_bytes)} more was wanted.",
            "F.linear_cross_entropy makes them in pieces; tenure.adaptive.step(loss_of, batch) "
            "runs the batch in micro-batches.",
        ),
    )


def _numbers_of_classes(facts: Facts) -> Iterator[int]:
    """How many rows those weights have that are much wider than what they get."""
    for entry in facts.entries:
        row = entry.owner
        if row.category == PARAMETERS and len(row.shape) == 2:
            n, width = (size if isinstance(size, int) else 0 for size in row.shape)
            if n >= max(_FEWEST_CLASSES, _WIDENING * width + 1):
                yield n


def _host(facts: Facts) -> Verdict | None:
    host = facts.host
    if facts.device != "cpu" or facts.info.kind != "host" or host is None:
        return None
    tensors = facts.used_bytes
    others = host.rss_bytes - host.began_bytes - tensors
    limit = host.own_limit_bytes or host.limit_bytes
    group = f" of {format_bytes(limit)}" if limit else ""
    if others > tensors + facts.wanted_bytes and others > host.rss_bytes // 4:
        return Verdict(
            "host",
            others,
            f"Host memory: {format_bytes(others)} is no tensors (NumPy, Python). Free it first.",
            (
                f"The process has {format_bytes(host.rss_bytes)}{group}; tensors take "
                f"{format_bytes(tensors)} of it, and since recording began "
                f"{format_bytes(others)} of other objects came.",
                "Arrays, lists of numbers and data sets in memory count here: read them in pieces "
                "or map them (numpy.memmap, torch.load(mmap=True)).",
            ),
        )
    return None


def _weights(facts: Facts) -> Verdict | None:
    fixed = facts.bytes_of(*_FIXED)
    movable = facts.used_bytes + facts.wanted_bytes - fixed
    # an error of Python's own says nothing of what it wanted, and has nothing to do with a few
    # weights that are there as well
    is_much = facts.wanted_bytes if facts.total_bytes is None else 2 * fixed >= facts.total_bytes
    if not fixed or not is_much or fixed < 3 * movable:
        return None
    return _too_large(facts, facts.bytes_of(PARAMETERS, BUFFERS))


def _trains(facts: Facts) -> bool:
    """Whether what ran is a part of training; autograd alone records in most evaluations, too."""
    scene = facts.scene
    if scene.all_in_eval or not (scene.is_training or scene.is_backward):
        return False
    return scene.is_backward or bool(facts.steps or facts.bytes_of(GRADIENTS, OPTIMIZER_STATE))


def _line_of(site: str) -> str:
    """A line without its folder and its function; none of what is no file."""
    if site.startswith("<"):
        return ""
    return site.partition(" in ")[0].replace("\\", "/").rpartition("/")[2]


def _batch(facts: Facts) -> Verdict:
    saved = facts.bytes_of(SAVED)
    others = facts.bytes_of(OTHERS)
    wanted, scene = facts.wanted_bytes, facts.scene
    n_bytes = saved + others + wanted
    size = format_bytes(n_bytes)
    if not n_bytes:
        return Verdict("unknown", 0, "Out of memory; too little was seen to tell why.", facts.notes)
    total = f" of {format_bytes(facts.total_bytes)}" if facts.total_bytes else ""
    is_one = wanted > (facts.total_bytes or 2 * max(1, facts.used_bytes))
    line = _line_of(scene.site)
    at = f"{line}: " if line else ""
    if is_one:
        told = f"{at}one tensor takes {format_bytes(wanted)}{total}"
        head = f"Batch too large: {told}. Use chunked()."
        in_use = format_bytes(facts.used_bytes)
        evidence = f"{format_bytes(wanted)} is wanted at once, {in_use} is in use."
    elif scene.all_in_eval and saved > n_bytes // 4:
        head = f"Batch too large: graphs take {format_bytes(saved)} in eval(). Use torch.no_grad()."
        evidence = f"The modules are in eval mode, and autograd saved {format_bytes(saved)}."
    elif again := runs_again(facts.entries):
        head = f"Batch too large, or a state is never cut: {size}{total}. Use state.detach()."
        evidence = (
            f"The same is saved {again} times, more than there are weights: a state that goes "
            "from step to step, or from batch to batch, keeps the graphs of all."
        )
    elif saved or _trains(facts):
        head = f"Batch too large: it takes {size}{total}. Use tenure.adaptive.step()."
        evidence = f"What the batch makes takes {size}."
        if saved:
            evidence = f"Autograd saved {format_bytes(saved)} for the backward pass of this batch."
    else:
        head = f"Batch too large: {at}it takes {size}{total}. Use @chunked()."
        evidence = f"What the batch makes takes {size}."
    return Verdict(
        "batch",
        n_bytes,
        head,
        (
            f"{evidence} Parameters, gradients and optimizer state take "
            f"{format_bytes(facts.bytes_of(*_FIXED))}; nothing was found that piles up.",
            "tenure.adaptive.step(loss_of, batch) trains on it in micro-batches that fit, with the "
            "gradients of the whole; @chunked evaluates in pieces.",
        ),
    )
