"""What ran when memory ran out, where nothing is kept without use: each names what is too large."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tenure._text import counted, format_bytes

from .._owners import BUFFERS, GRADIENTS, OPTIMIZER_STATE, OTHERS, PARAMETERS, SAVED, TensorRow
from .._reports import place_of
from ._facts import Facts
from ._piles import OF_FORWARD, runs_again
from ._verdict import Verdict, short

FIXED = (PARAMETERS, BUFFERS, GRADIENTS, OPTIMIZER_STATE)
"""What a model and its training take, whatever the batch."""
# A layer whose output is this much wider than its input makes logits, and no hidden state: those
# of transformers are four times as wide at the most.
_WIDENING = 4
_FEWEST_CLASSES = 256
_LOSS_NODES = ("LogSoftmax", "NllLoss", "CrossEntropy", "Softmax")
# what a variable holds that is no container
_VARIABLES = frozenset({"frame-local", "global", "attribute"})
# Of an optimizer's state, where lists in it are the most.
_MOST = 0.45


def building(facts: Facts) -> Verdict | None:
    """A module that is made, loaded or moved, and does not fit."""
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
        f"Weights too large: {_model(facts)}{format_bytes(weights)}{of_total}. "
        "Use tenure.paging.page(model).",
        (
            f"Parameters and buffers take {format_bytes(weights)}, and {facts.device} has "
            f"{format_bytes(facts.total_bytes or 0)}."
            if facts.total_bytes
            else f"Parameters and buffers take {format_bytes(weights)}.",
            "tenure.paging.page(model) runs it from the host's memory or from disk; weights of "
            "half the precision take half.",
        ),
    )


def _model(facts: Facts) -> str:
    """The model that is made, or the largest, and the line, as the first line names them."""
    named = facts.scene.building or _largest_model(facts, (PARAMETERS,))
    line = line_of(facts.scene.site)
    found = f"{named} at {line}" if named and line else named or line
    return f"{found}: " if found else ""


def _largest_model(facts: Facts, categories: tuple[str, ...], prefix: str = "") -> str:
    """The class of the model that most of some categories belongs to."""
    sizes: Counter[str] = Counter()
    for entry in facts.entries:
        row = entry.owner
        if row.category in categories and row.name.startswith(prefix):
            sizes[row.name.removeprefix(prefix).partition(".")[0]] += row.n_bytes
    return next((name for name, _ in sizes.most_common(1)), "")


def optimizer(facts: Facts) -> Verdict | None:
    """An optimizer whose step makes its state, or copies."""
    scene = facts.scene
    if not scene.optimizer:
        return None
    if (growing := _history(facts)) is not None:
        return growing
    state = facts.bytes_of(OPTIMIZER_STATE)
    n_bytes = max(scene.state_bytes + facts.wanted_bytes, scene.optimizer_bytes)
    model = format_bytes(scene.optimizer_bytes)
    name = f"{scene.optimizer} ({scene.optimizer_name})" if scene.optimizer_name else ""
    of = _largest_model(facts, (OPTIMIZER_STATE,), f"{scene.optimizer}.") or _largest_model(
        facts, (PARAMETERS,)
    )
    whose = f"{name or scene.optimizer} of {of}" if of else name or scene.optimizer
    if scene.is_first_step:
        head = f"Optimizer state: {whose} makes it in the first step. Use page(), or SGD."
        told = f"The state is made in the first step, of which {format_bytes(state)} was there"
    else:
        head = f"Optimizer state: {whose}: step() copies. Use foreach=False, or page()."
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


def _history(facts: Facts) -> Verdict | None:
    """A list in an optimizer's state that grows from step to step."""
    sizes: Counter[str] = Counter()
    for entry in facts.entries:
        row = entry.owner
        if row.category == OPTIMIZER_STATE and row.name.endswith("]"):
            sizes[place_of(row.name)] += row.n_bytes
    place, n_bytes = next(iter(sizes.most_common(1)), ("", 0))
    if n_bytes < _MOST * max(1, facts.bytes_of(OPTIMIZER_STATE)) or not _is_much(n_bytes, facts):
        return None
    size = format_bytes(sum(sizes.values()))
    setting = "history_size=" if "LBFGS" in place else "the list"
    return Verdict(
        "optimizer_state",
        sum(sizes.values()),
        f"Optimizer state: {short(place)} grows, {size}. Lower {setting}, "
        "or use another optimizer.",
        (
            f"The lists in the state take {size}, {place} the most: each step adds to them.",
            "LBFGS keeps history_size= steps of the length of all its parameters, 100 of them "
            "unless told otherwise.",
        ),
    )


def _is_much(n_bytes: int, facts: Facts) -> bool:
    return n_bytes >= 0.25 * (facts.used_bytes + facts.wanted_bytes)


def logits(facts: Facts) -> Verdict | None:
    """Outputs over many classes, their softmax and its gradient."""
    heads = dict(_heads(facts))
    scene = facts.scene
    if not heads:
        return None
    rows = [
        e.owner
        for e in facts.entries
        if e.owner.category in (OTHERS, SAVED) and e.owner.shape and e.owner.shape[-1] in heads
    ]
    of_loss = (
        scene.is_loss or scene.is_backward or any(row.name.startswith(_LOSS_NODES) for row in rows)
    )
    in_head = scene.is_forward and scene.out_features in heads
    if not of_loss and not in_head:
        return None
    is_wanted = scene.is_loss or in_head or scene.is_backward
    n_bytes = sum(row.n_bytes for row in rows) + (facts.wanted_bytes if is_wanted else 0)
    movable = facts.used_bytes + facts.wanted_bytes - facts.bytes_of(*FIXED)
    if n_bytes < 0.4 * movable:
        return None
    width = max(row.shape[-1] for row in rows) if rows else scene.out_features
    head = heads.get(width, "") if isinstance(width, int) else ""
    of_head = f" of {short(head)}" if head else ""
    return Verdict(
        "logits",
        n_bytes,
        f"Logits: {format_bytes(n_bytes)}{of_head} for {width} classes. "
        "Use F.linear_cross_entropy.",
        (
            f"Logits, their softmax and its gradient take {format_bytes(n_bytes)} of "
            f"{format_bytes(movable)} that the batch takes: {counted(len(rows), 'tensor')} of "
            f"{width} classes, and {format_bytes(facts.wanted_bytes)} more was wanted.",
            "F.linear_cross_entropy makes them in pieces; tenure.adaptive.step(loss_of, batch) "
            "runs the batch in micro-batches.",
        ),
    )


def _heads(facts: Facts) -> Iterator[tuple[int, str]]:
    """The layers that are much wider than what they get, and that no other layer reads."""
    rows = [entry.owner for entry in facts.entries if entry.owner.category == PARAMETERS]
    # a wide hidden layer is read by the next, which is as wide in its second dimension
    read = {row.shape[1] for row in rows if len(row.shape) > 1}
    for row in rows:
        if len(row.shape) == 2:
            n, width = (size if isinstance(size, int) else 0 for size in row.shape)
            if n >= max(_FEWEST_CLASSES, _WIDENING * width + 1) and n not in read:
                yield n, row.name.partition("+")[0].removesuffix(".weight")


def weights(facts: Facts) -> Verdict | None:
    """A model that takes most of the memory by itself."""
    fixed = facts.bytes_of(*FIXED)
    movable = facts.used_bytes + facts.wanted_bytes - fixed
    # an error of Python's own says nothing of what it wanted, and has nothing to do with a few
    # weights that are there as well
    is_much = facts.wanted_bytes if facts.total_bytes is None else 2 * fixed >= facts.total_bytes
    if not fixed or not is_much or fixed < 3 * movable:
        return None
    return _too_large(facts, facts.bytes_of(PARAMETERS, BUFFERS))


def trains(facts: Facts) -> bool:
    """Whether what ran is a part of training; autograd alone records in most evaluations, too."""
    scene = facts.scene
    if scene.all_in_eval or not (scene.is_training or scene.is_backward):
        return False
    return scene.is_backward or bool(facts.steps or facts.bytes_of(GRADIENTS, OPTIMIZER_STATE))


def line_of(site: str) -> str:
    """A line without its folder and its function; none of what is no file."""
    if site.startswith("<"):
        return ""
    return site.partition(" in ")[0].replace("\\", "/").rpartition("/")[2]


def _at(facts: Facts) -> str:
    """Where the batch runs: the line, and the module."""
    line, module = line_of(facts.scene.site), facts.scene.module
    found = " in ".join(filter(None, (line, module)))
    return f"{found}: " if found else ""


def batch(facts: Facts) -> Verdict:
    """What the work makes: the rest of all causes."""
    saved = facts.bytes_of(SAVED)
    n_bytes = saved + facts.bytes_of(OTHERS) + facts.wanted_bytes
    if not n_bytes:
        return Verdict("unknown", 0, "Out of memory; too little was seen to tell why.", facts.notes)
    head, evidence = _told_of_batch(facts, saved, n_bytes)
    return Verdict(
        "batch",
        n_bytes,
        head,
        (
            f"{evidence} Parameters, gradients and optimizer state take "
            f"{format_bytes(facts.bytes_of(*FIXED))}; nothing was found that piles up.",
            "tenure.adaptive.step(loss_of, batch) trains on it in micro-batches that fit, with the "
            "gradients of the whole; @chunked evaluates in pieces.",
        ),
    )


def _largest_variable(facts: Facts) -> TensorRow | None:
    """Return a tensor of at least half of all bytes that a variable outside forward() holds."""
    found = (
        entry.owner
        for entry in facts.entries
        if entry.owner.category == OTHERS
        and entry.kind in _VARIABLES
        and 2 * entry.owner.n_bytes >= facts.used_bytes + facts.wanted_bytes
        and OF_FORWARD not in entry.owner.name
    )
    return next(found, None)


def _told_of_batch(facts: Facts, saved: int, n_bytes: int) -> tuple[str, str]:
    """The first line and the first sentence below it."""
    wanted, scene, at = facts.wanted_bytes, facts.scene, _at(facts)
    size, all_of = format_bytes(n_bytes), facts.total_bytes
    total = f" of {format_bytes(all_of)}" if all_of else ""
    evidence = f"What the batch makes takes {size}."
    # a small graph may be left from anything that ran before
    computes = scene.is_forward or 4 * saved > wanted
    is_training = trains(facts) or (computes and scene.is_training and not scene.all_in_eval)
    if wanted > (all_of or 2 * max(1, facts.used_bytes)):
        in_use = format_bytes(facts.used_bytes)
        remedy = "Use a smaller batch, or adaptive.step()." if is_training else "Use chunked()."
        return (
            f"Batch too large: {at}one tensor takes {format_bytes(wanted)}{total}. {remedy}",
            f"{format_bytes(wanted)} is wanted at once, {in_use} is in use.",
        )
    if scene.all_in_eval and saved > n_bytes // 4:
        graphs = f"graphs take {format_bytes(saved)} in eval()"
        return (
            f"Batch too large: {at}{graphs}. Use torch.no_grad().",
            f"The modules are in eval mode, and autograd saved {format_bytes(saved)}.",
        )
    if again := runs_again(facts.entries):
        state = next((v.name for v in scene.variables if v.is_carried and not v.is_past), "state")
        return (
            f"Batch too large, or a state is never cut: {at}{size}{total}. Use {state}.detach().",
            f"The same is saved {again} times, more than there are weights: a state that goes "
            "from step to step, or from batch to batch, keeps the graphs of all.",
        )
    if (data := _largest_variable(facts)) is not None:
        takes = f"{short(data.name)} alone takes {format_bytes(data.n_bytes)}{total}"
        return f"Batch too large: {takes}. Take it in parts.", (
            f"{takes}: keep it on the host or on disk (torch.load(mmap=True)), and move a part at "
            "a time."
        )
    if saved or is_training:
        if saved:
            evidence = f"Autograd saved {format_bytes(saved)} for the backward pass of this batch."
        return f"Batch too large: {at}it takes {size}{total}. Use tenure.adaptive.step().", evidence
    return f"Batch too large: {at}it takes {size}{total}. Use @chunked().", evidence
