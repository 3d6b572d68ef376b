"""Which cause an out-of-memory error has: candidates by bytes, and one table of texts.

A pile is the cause if it is much of what could be free: without it the same work would have fitted,
as it did when the program began. Otherwise the cause is what ran.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer

from tenure._heap import instances, is_kind, tracked_objects, type_name
from tenure._text import format_bytes

from .._owners import (
    BUFFERS,
    OPTIMIZER_STATE,
    OTHERS,
    PARAMETERS,
    SAVED,
    TensorRow,
)
from ._facts import BACKWARD, Facts, short
from ._piles import (
    OF_FORWARD,
    Candidate,
    at_line,
    kept_models,
    kept_tensors,
    line_of,
    parameters_of,
    runs_again,
    shortened,
)

# Of all that the work itself takes: a smaller pile is beside the point.
_MUCH = 0.25
# The same where what ran has a cause of its own.
_MOST = 0.45
# The same of what is without use for certain, whatever ran.
_LITTLE = 0.15
_USELESS = ("gradients", "cycle", "traceback")
# A layer whose output is this much wider than its input makes logits, and no hidden state: those
# of transformers are four times as wide at the most.
_WIDENING = 4
_FEWEST_CLASSES = 256
_LOSSES = frozenset(
    {"cross_entropy", "log_softmax", "nll_loss", "softmax", "fixed_cross_entropy", "kl_div"}
    | {BACKWARD}
)
_LOSS_NODES = ("LogSoftmax", "NllLoss", "CrossEntropy", "Softmax")
# without its options torch makes all logits all the same
_LINEAR_LOSS = (
    "F.linear_cross_entropy(..., options=nn.LinearCrossEntropyOptions())"
    if hasattr(F, "linear_cross_entropy")
    else "tenure.adaptive.step()"
)
_OF_WORKER = re.compile(r"^Caught \w+ in DataLoader worker process (\d+)")
_LINES = re.compile(r'^ *File "([^"]+)", line (\d+), in (\S+)', re.MULTILINE)
# holders of a variable that is no container
_VARIABLES = frozenset({"frame-local", "global", "attribute"})

# of each cause the beginning of the first line, and advice beyond it
TEXTS: dict[str, tuple[str, str]] = {
    "leak": (
        "Leak: ",
        "Bound it (a deque with maxlen=, an lru_cache with maxsize=), keep .item() or .detach() of "
        "what has a graph, move it to the host (.cpu()) or to disk (torch.save), or remove the "
        "hook that fills it; a tenure scope around the step frees what outlives it.",
    ),
    "results": ("Results pile up: ", "Reduce each to what is needed, or move it to the host."),
    "cycle": ("Reference cycle: ", "A weak reference or ctx.save_for_backward() breaks it."),
    "traceback": ("Kept exception: ", "Retry after the except block. Log records keep one too."),
    "gradients": ("Gradients: ", "Clear them once more when the training of a model has ended."),
    "logits": ("Logits: ", "tenure.adaptive.step(loss_of, batch) runs micro-batches."),
    "optimizer_state": ("Optimizer state: ", "page(model, training=True) keeps it off the device."),
    "batch": ("Batch too large: ", "Nothing piles up. step() keeps the gradients of the whole."),
    "weights": ("Weights too large: ", "Weights of half the precision take half."),
    "fragmentation": ("Fragmentation: ", "Set it in PYTORCH_ALLOC_CONF before the start."),
    "other_process": ("Another process: ", "nvidia-smi lists them; an open notebook is one."),
    "host": ("Host memory: ", "Read data in pieces, or map it (numpy.memmap, mmap=True)."),
    "unknown": ("Out of memory; ", ""),
}


UNKNOWN = Candidate("unknown", 0, "too little was seen to tell why.")


def judge(facts: Facts) -> Candidate:
    """Find the cause, the certain ones first."""
    certain = (_worker, _fragmentation, _other_process)
    rules = (*certain, _pile, _phase, _host, _copies, _weights, _batch)
    return next(filter(None, (rule(facts) for rule in rules)), UNKNOWN)


# --- what is certain by the numbers of the allocator and of the host


def _worker(facts: Facts) -> Candidate | None:
    """Return an error that a process of a loader has sent, with its own line."""
    found = _OF_WORKER.search(facts.info.text)
    if found is None:
        return None
    where = [each for each in _LINES.findall(facts.info.text) if "site-packages" not in each[0]]
    at = "".join(
        f" at {os.path.basename(path)}:{line} in {name}" for path, line, name in where[-1:]
    )
    text = f"in DataLoader worker {found[1]}{at}, whose tensors are not seen here."
    return Candidate("unknown", 0, text)


def _fragmentation(facts: Facts) -> Candidate | None:
    sizes, wanted = facts.fragmentation, facts.wanted_bytes
    if not sizes or not wanted:
        return None
    unused, largest = sizes["unused_bytes"], sizes.get("largest_free_bytes", 0)
    is_enough = unused + (facts.free_bytes or 0) >= wanted > largest
    if not is_enough or unused < sizes["reserved_bytes"] // 10:
        return None
    text = f"{format_bytes(unused)} reserved, unused. Set expandable_segments:True."
    return Candidate("fragmentation", unused, text)


def _other_process(facts: Facts) -> Candidate | None:
    total, others = facts.total_bytes or 0, facts.others_bytes
    if not total or others < max(total // 10, facts.used_bytes, facts.own_bytes):
        return None
    text = f"{format_bytes(others)} of {facts.device}. End it, or use another device."
    return Candidate("other_process", others, text)


def _host(facts: Facts) -> Candidate | None:
    if facts.device != "cpu" or facts.info.kind != "host" or not facts.host:
        return None
    tensors, rss = facts.used_bytes, facts.host["rss_bytes"]
    others = rss - facts.began_bytes - tensors
    if others <= max(tensors + facts.wanted_bytes, rss // 4):
        return None
    text = f"{format_bytes(others)} is no tensors (NumPy, Python). Free it first."
    return Candidate("host", others, text)


# --- what ran


def _phase(facts: Facts) -> Candidate | None:
    """Return the cause of a phase: a model is made, an optimizer steps, a loss is computed."""
    now = facts.bytes_of(PARAMETERS, BUFFERS) + facts.wanted_bytes
    n_bytes = max(facts.building_bytes, now)
    if facts.building and facts.model is None and n_bytes >= _MOST * facts.own_bytes:
        return _too_large(facts, n_bytes)
    return _optimizer(facts) or _logits(facts)


def _weights(facts: Facts) -> Candidate | None:
    """Return a model that takes most of the memory by itself."""
    fixed = facts.fixed_bytes
    # an error of Python's own says nothing of what it wanted, and has nothing to do with a few
    # weights that are there as well
    is_much = facts.wanted_bytes if facts.total_bytes is None else 2 * fixed >= facts.total_bytes
    if not fixed or not is_much or fixed < 3 * facts.movable_bytes:
        return None
    return _too_large(facts, facts.bytes_of(PARAMETERS, BUFFERS))


def _copies(facts: Facts) -> Candidate | None:
    """Return copies of weights, which a checkpoint is loaded to or saved from."""
    loads = "persistent_load" in facts.names
    if facts.model is not None or not (loads or "state_dict" in facts.called_names):
        return None
    sizes = {row.n_bytes for row in facts.rows(PARAMETERS, BUFFERS)}
    copied = sum(row.n_bytes for row in facts.rows(OTHERS) if row.n_bytes in sizes)
    n_bytes = copied + facts.wanted_bytes
    is_weight = min(sizes, default=0) <= facts.wanted_bytes <= 1.2 * max(sizes, default=0)
    if not loads and (not is_weight or 2 * n_bytes < facts.movable_bytes):
        return None
    remedy = 'Load with map_location="cpu".' if loads else "Copy each to the host with .cpu()."
    size = f"copies take {format_bytes(n_bytes)}{facts.of_total}"
    return Candidate("weights", n_bytes, f"{line_of(facts.site)}: {size}. {remedy}")


def _too_large(facts: Facts, n_bytes: int) -> Candidate:
    """With the model that is made, or the largest, and the line."""
    at = f"{facts.building or _largest_model(facts)}{at_line(facts.site)}: "
    size = f"{format_bytes(n_bytes)}{facts.of_total}"
    return Candidate("weights", n_bytes, f"{at}{size}. Use tenure.paging.page(model).")


def _largest_model(facts: Facts) -> str:
    """Return the class of the model with the most parameters."""
    sizes: Counter[str] = Counter()
    for row in facts.rows(PARAMETERS):
        sizes[row.name.partition(".")[0]] += row.n_bytes
    return max(sizes, key=lambda name: sizes[name], default="a model")


def _optimizer(facts: Facts) -> Candidate | None:
    """Return an optimizer whose step makes its state, or copies."""
    optimizer: Any = None if facts.optimizer is None else facts.optimizer()
    if optimizer is None:
        return None
    name, parameters = type_name(type(optimizer)), parameters_of(optimizer)
    named = f"{name} ({facts.optimizer_name})" if facts.optimizer_name else name
    whose = f"{named} of {_largest_model(facts)}"
    state = facts.bytes_of(OPTIMIZER_STATE)
    n_bytes = max(state + facts.wanted_bytes, sum(p.nbytes for p in parameters))
    if name == "LBFGS":
        text = f"{whose} has {format_bytes(state)}. Lower history_size=, or use another optimizer."
    elif all(_has_state(optimizer.state.get(p)) for p in parameters if p.grad is not None):
        remedy = "Use foreach=False, or page()." if _steps_together(optimizer) else "Use page()."
        text = f"{whose}: step() copies. {remedy}"
    else:
        less = "momentum=0" if name == "SGD" else "SGD"
        text = f"{whose} makes it in the first step. Use page(), or {less}."
    return Candidate("optimizer_state", n_bytes, text)


def _has_state(state: Any) -> bool:
    """Return whether an optimizer has made a parameter's state: a number of steps is none yet."""
    values = state.values() if isinstance(state, dict) else ()
    return any(is_kind(type(t), Tensor) and t.numel() > 1 for t in values)


def _steps_together(optimizer: Any) -> bool:
    """Return whether a step takes all parameters at once: by default not on the CPU."""
    asked = (group.get("foreach") for group in optimizer.param_groups)
    on_cpu = all(p.device.type == "cpu" for p in parameters_of(optimizer))
    return any(not on_cpu if foreach is None else foreach for foreach in asked)


def _logits(facts: Facts) -> Candidate | None:
    """Return the outputs over many classes, their softmax and its gradient."""
    heads = dict(_heads(facts))
    rows = [row for row in facts.rows(OTHERS, SAVED) if row.shape and row.shape[-1] in heads]
    # a copy of them before the loss, as by a slice and reshape(), is as wide
    largest = max(rows, default=None, key=lambda row: row.n_bytes)
    is_copy = largest is not None and 0.5 < facts.wanted_bytes / max(1, largest.n_bytes) <= 1
    is_wanted = facts.names & _LOSSES or facts.out_features in heads or is_copy
    if not is_wanted and not any(row.name.startswith(_LOSS_NODES) for row in rows):
        return None
    n_bytes = sum(row.n_bytes for row in rows) + (facts.wanted_bytes if is_wanted else 0)
    width = max((row.shape[-1] for row in rows), default=facts.out_features)
    if width not in heads or n_bytes < 0.4 * facts.movable_bytes:
        return None
    of = f"{format_bytes(n_bytes)} of {shortened(heads[width])}"
    return Candidate("logits", n_bytes, f"{of} for {width} classes. Use {_LINEAR_LOSS}.")


def _heads(facts: Facts) -> Iterator[tuple[Any, str]]:
    """Yield the layers that are much wider than what they get, and that no other layer reads."""
    rows = [row for row in facts.rows(PARAMETERS) if len(row.shape) > 1]
    # a wide hidden layer is read by the next, which is as wide in its second dimension
    read = {row.shape[1] for row in rows}
    for row in (row for row in rows if len(row.shape) == 2):
        n, width = (size if isinstance(size, int) else 0 for size in row.shape)
        if n >= max(_FEWEST_CLASSES, _WIDENING * width + 1) and n not in read:
            yield n, row.name.partition("+")[0].removesuffix(".weight")


def _batch(facts: Facts) -> Candidate | None:
    """Return the batch as the cause, for all memory that no other cause explains."""
    wanted, saved, total = facts.wanted_bytes, facts.bytes_of(SAVED), facts.of_total
    n_bytes = saved + facts.bytes_of(OTHERS) + wanted
    # what was found is not what fills the memory
    if not n_bytes or 2 * facts.all_bytes < facts.own_bytes:
        return None
    # a small graph may be left from anything that ran before
    computes = facts.model is not None or 4 * saved > wanted
    trains = facts.trains or (computes and facts.is_recording and not facts.all_in_eval)
    remedy = "Use tenure.adaptive.step()." if trains else "Use chunked()."
    if facts.batch_size == 1:
        remedy = "Shorten its input, or use torch.utils.checkpoint."
    at, what = [line_of(facts.site), facts.module], f"it takes {format_bytes(n_bytes)}{total}"
    if wanted > (facts.total_bytes or 2 * max(1, facts.used_bytes)):
        what = f"one tensor takes {format_bytes(wanted)}{total}"
        if facts.watch.broadcast:
            what = f"{facts.watch.broadcast}, {format_bytes(wanted)}{total}"
            remedy = "squeeze() one if that is not meant."
    elif facts.all_in_eval and saved > n_bytes // 4:
        what, remedy = f"graphs take {format_bytes(saved)} in eval()", "Use torch.no_grad()."
    elif model := _untrained(facts):
        what = f"graphs take {format_bytes(saved)}, and no optimizer steps the {model}"
        remedy = "Call it under torch.no_grad()."
    elif facts.carried and runs_again(facts):
        what = f"{what}, or a state is never cut"
        remedy = f"Use {facts.carried[0].name}.detach()."
    elif data := _largest_variable(facts):
        name, size = shortened(short(data.name)), format_bytes(data.n_bytes)
        at, what, remedy = [], f"{name} alone takes {size}{total}", "Take it in parts."
    found = ": ".join(filter(None, (" in ".join(filter(None, at)), what)))
    return Candidate("batch", n_bytes, f"{found}. {remedy}")


def _untrained(facts: Facts) -> str:
    """Return the class of a model whose graphs no optimizer needs, such as a teacher; else ""."""
    model = None if facts.model is None else facts.model()
    if model is None or not (facts.is_recording and facts.has_own_graph):
        return ""
    optimizers = instances(tracked_objects(), Optimizer)
    known = {id(p) for each in optimizers for p in parameters_of(each)}
    own = {id(p) for p in model.parameters() if p.requires_grad}
    return type_name(type(model)) if known and own and known.isdisjoint(own) else ""


def _largest_variable(facts: Facts) -> TensorRow | None:
    """Return a tensor of at least half of all bytes that a variable outside of forward() holds."""
    found = (
        entry.owner
        for entry in facts.entries
        if entry.owner.category == OTHERS
        and entry.kind in _VARIABLES
        and 2 * entry.owner.n_bytes >= facts.all_bytes
        and OF_FORWARD not in entry.owner.name
    )
    return next(found, None)


# --- what is kept without use


def _pile(facts: Facts) -> Candidate | None:
    """Return the most of what is kept without use, if without it there would have been room."""
    kept: list[Candidate] = []
    facts.ask(lambda: kept.extend(kept_models(facts)), "the models")
    facts.ask(lambda: kept.extend(kept_tensors(facts)), "what is kept")
    phase = _phase(facts)
    found = (each for each in kept if _explains(each, facts, phase))
    return max(found, default=None, key=lambda each: each.n_bytes)


def _explains(pile: Candidate, facts: Facts, phase: Candidate | None) -> bool:
    if facts.free_bytes is not None and pile.n_bytes < facts.wanted_bytes - facts.free_bytes:
        return False
    # of a phase that fills memory for good, all of it counts
    if phase is not None and phase.cause != "logits":
        least = _LITTLE if pile.cause in _USELESS else _MOST
        return pile.n_bytes >= least * max(facts.all_bytes, phase.n_bytes)
    # models that are kept, and a buffer that grows, are no movable bytes, and could be free
    share = pile.n_bytes / max(1, facts.movable_bytes, pile.n_bytes)
    return share >= (_MUCH if phase is None else _MOST)
