"""Which cause an out-of-memory error has: rules by bytes, the certain ones first.

What is of no use any more is the cause where it is much of what could be free: without it the same
work would have fitted, as it did when the program began. Otherwise it is what ran.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tenure._text import format_bytes

from .._owners import BUFFERS, OPTIMIZER_STATE, OTHERS, PARAMETERS, SAVED, TensorRow
from .._reports import place_of
from ._facts import Facts
from ._kept import OF_FORWARD, kept_tensors
from ._kept_graphs import line_of, runs_again
from ._kept_models import kept_models
from ._kinds import Candidate, Verdict, shortened, verdict_on
from ._scene import short

# Of all that the work itself takes: a smaller pile is beside the point.
_MUCH = 0.25
# The same where what ran has a cause of its own.
_MOST = 0.45
# A pile that has a rule of its own comes before a plain one, if both are about as large.
_TELLING = 1.3
_PLAIN = frozenset({"tensors", "graphs", "grad graphs", "results", "result graphs", "models"})
_OF_MODELS = frozenset({"models", "optimizers", "parts"})
# A layer whose output is this much wider than its input makes logits, and no hidden state: those
# of transformers are four times as wide at the most.
_WIDENING = 4
_FEWEST_CLASSES = 256
_LOSS_NODES = ("LogSoftmax", "NllLoss", "CrossEntropy", "Softmax")
# holders of a variable that is no container
_VARIABLES = frozenset({"frame-local", "global", "attribute"})


def judge(facts: Facts) -> Verdict:
    """The cause; `unknown` where nothing was seen that could be one."""
    phase = _building(facts) or _optimizer(facts) or _logits(facts)
    found = _fragmentation(facts) or _other_process(facts) or _pile(facts, phase)
    found = found or phase or _host(facts) or _weights(facts) or _batch(facts)
    return verdict_on(found, facts)


def _pile(facts: Facts, phase: Candidate | None) -> Candidate | None:
    """The most of what is kept without use, if without it there would have been room."""
    kept: list[Candidate] = []
    facts.ask(lambda: kept.extend(kept_models(facts)), "the models")
    facts.ask(lambda: kept.extend(kept_tensors(facts)), "what is kept")
    found = [each for each in kept if _explains(each, facts, phase)]
    return max(
        found,
        key=lambda each: each.n_bytes * (1 if each.kind in _PLAIN else _TELLING),
        default=None,
    )


def _explains(pile: Candidate, facts: Facts, phase: Candidate | None) -> bool:
    lacking = facts.wanted_bytes - (facts.free_bytes or 0)
    if facts.free_bytes is not None and pile.n_bytes < lacking:
        return False
    if facts.total_bytes is not None and facts.wanted_bytes > facts.total_bytes:
        return False
    # of a phase that fills memory for good, all of it counts
    if phase is not None and phase.kind != "logits":
        return pile.n_bytes >= _MOST * max(facts.all_bytes, phase.n_bytes)
    of_work = facts.all_bytes if pile.kind in _OF_MODELS else facts.movable_bytes
    # gradients could be free, and weights could not
    if pile.kind == "gradients":
        of_work = facts.movable_bytes + pile.n_bytes
    # a buffer that grows is a part of the model, and of the work all the same
    share = pile.n_bytes / max(1, of_work, pile.n_bytes)
    return share >= (_MUCH if phase is None else _MOST)


# --- what is certain by the numbers of the allocator


def _fragmentation(facts: Facts) -> Candidate | None:
    counted_bytes, wanted = facts.fragmentation, facts.wanted_bytes
    if not counted_bytes or not wanted:
        return None
    unused, largest = counted_bytes["unused_bytes"], counted_bytes.get("largest_free_bytes", 0)
    is_enough = unused + (facts.free_bytes or 0) >= wanted > largest
    if not is_enough or unused < counted_bytes["reserved_bytes"] // 10:
        return None
    return Candidate("fragmentation", unused, {"largest": largest})


def _other_process(facts: Facts) -> Candidate | None:
    total, others, free = facts.total_bytes or 0, facts.others_bytes, facts.free_bytes or 0
    own = max(facts.used_bytes, total - others - free)
    if not total or others < total // 10 or others < own:
        return None
    return Candidate("other_process", others, {"own": own})


def _host(facts: Facts) -> Candidate | None:
    if facts.device != "cpu" or facts.info.kind != "host" or not facts.host:
        return None
    tensors, rss = facts.used_bytes, facts.host["rss_bytes"]
    others = rss - facts.began_bytes - tensors
    limit = facts.host.get("own_limit_bytes") or facts.host.get("limit_bytes")
    if others <= tensors + facts.wanted_bytes or others <= rss // 4:
        return None
    return Candidate("host", others, {"limit": f" of {format_bytes(limit)}" if limit else ""})


# --- models and optimizers


def _building(facts: Facts) -> Candidate | None:
    """A module that is made, loaded or moved, and does not fit."""
    if not facts.scene.building or facts.scene.is_forward:
        return None
    now = facts.bytes_of(PARAMETERS, BUFFERS) + facts.wanted_bytes
    return _too_large(facts, max(facts.scene.building_bytes, now))


def _weights(facts: Facts) -> Candidate | None:
    """A model that takes most of the memory by itself."""
    fixed = facts.fixed_bytes
    # an error of Python's own says nothing of what it wanted, and has nothing to do with a few
    # weights that are there as well
    is_much = facts.wanted_bytes if facts.total_bytes is None else 2 * fixed >= facts.total_bytes
    if not fixed or not is_much or fixed < 3 * facts.movable_bytes:
        return None
    return _too_large(facts, facts.bytes_of(PARAMETERS, BUFFERS))


def _too_large(facts: Facts, n_bytes: int) -> Candidate:
    """With the model that is made, or the largest, and the line."""
    named = facts.scene.building or _largest_model(facts, PARAMETERS)
    found = " at ".join(filter(None, (named, line_of(facts.scene.site))))
    return Candidate("weights", n_bytes, {"at": f"{found}: " if found else ""})


def _largest_model(facts: Facts, category: str, prefix: str = "") -> str:
    """The class of the model that most of a category belongs to."""
    sizes: Counter[str] = Counter()
    for entry in facts.entries:
        row = entry.owner
        if row.category == category and row.name.startswith(prefix):
            sizes[row.name.removeprefix(prefix).partition(".")[0]] += row.n_bytes
    return next((name for name, _ in sizes.most_common(1)), "")


def _optimizer(facts: Facts) -> Candidate | None:
    """An optimizer whose step makes its state, or copies."""
    scene = facts.scene
    name = scene.optimizer
    if not name:
        return None
    if (growing := _history(facts)) is not None:
        return growing
    state = format_bytes(facts.bytes_of(OPTIMIZER_STATE))
    n_bytes = max(scene.state_bytes + facts.wanted_bytes, scene.optimizer_bytes)
    of = _largest_model(facts, OPTIMIZER_STATE, f"{name}.") or _largest_model(facts, PARAMETERS)
    whose = f"{name} ({scene.optimizer_name})" if scene.optimizer_name else name
    first = f"The state is made in the first step, of which {state} was there"
    later = f"A step on many tensors at once takes copies of them beside {state}"
    words = {
        "whose": f"{whose} of {of}" if of else whose,
        "less": "momentum=0" if name == "SGD" else "SGD",
        "evidence": first if scene.is_first_step else later,
    }
    return Candidate("first step" if scene.is_first_step else "step copies", n_bytes, words)


def _history(facts: Facts) -> Candidate | None:
    """A list in an optimizer's state that grows from step to step."""
    sizes: Counter[str] = Counter()
    for entry in facts.entries:
        row = entry.owner
        if row.category == OPTIMIZER_STATE and row.name.endswith("]"):
            sizes[place_of(row.name)] += row.n_bytes
    place, n_bytes = next(iter(sizes.most_common(1)), ("", 0))
    is_most = n_bytes >= _MOST * max(1, facts.bytes_of(OPTIMIZER_STATE))
    if not is_most or n_bytes < _MUCH * facts.all_bytes:
        return None
    setting = "history_size=" if "LBFGS" in place else "the list"
    return Candidate("history", sizes.total(), {"name": place, "setting": setting})


# --- batches


def _logits(facts: Facts) -> Candidate | None:
    """Outputs over many classes, their softmax and its gradient."""
    heads, scene = dict(_heads(facts)), facts.scene
    rows = [
        entry.owner
        for entry in facts.entries
        if entry.owner.category in (OTHERS, SAVED)
        and entry.owner.shape
        and entry.owner.shape[-1] in heads
    ]
    is_wanted = scene.is_loss or scene.is_backward
    is_wanted = is_wanted or (scene.is_forward and scene.out_features in heads)
    if not is_wanted and not any(row.name.startswith(_LOSS_NODES) for row in rows):
        return None
    n_bytes = sum(row.n_bytes for row in rows) + (facts.wanted_bytes if is_wanted else 0)
    width = max(row.shape[-1] for row in rows) if rows else scene.out_features
    if not isinstance(width, int) or width not in heads or n_bytes < 0.4 * facts.movable_bytes:
        return None
    words = {
        "of": f" of {shortened(heads[width])}",
        "width": width,
        "n": len(rows),
    }
    return Candidate("logits", n_bytes, words)


def _heads(facts: Facts) -> Iterator[tuple[int | str, str]]:
    """The layers that are much wider than what they get, and that no other layer reads."""
    rows = [entry.owner for entry in facts.entries if entry.owner.category == PARAMETERS]
    # a wide hidden layer is read by the next, which is as wide in its second dimension
    read = {row.shape[1] for row in rows if len(row.shape) > 1}
    for row in rows:
        if len(row.shape) == 2:
            n, width = (size if isinstance(size, int) else 0 for size in row.shape)
            if n >= max(_FEWEST_CLASSES, _WIDENING * width + 1) and n not in read:
                yield n, row.name.partition("+")[0].removesuffix(".weight")


def _batch(facts: Facts) -> Candidate:
    """What the work makes: the rest of all causes."""
    n_bytes = facts.bytes_of(SAVED, OTHERS) + facts.wanted_bytes
    if not n_bytes:
        return Candidate("unknown", 0)
    found = " in ".join(filter(None, (line_of(facts.scene.site), facts.scene.module)))
    words: dict[str, object] = {
        "at": f"{found}: " if found else "",
    }
    kind, *told = _told_of_batch(facts, n_bytes)
    words.update(zip(("what", "remedy", "evidence"), told, strict=True))
    if kind == "data":
        kind, words["at"] = "batch", ""
    return Candidate(kind, n_bytes, words)


def _told_of_batch(facts: Facts, n_bytes: int) -> tuple[str, str, str, str]:
    """The kind, what is too large, its remedy, and the evidence."""
    wanted, scene, saved = facts.wanted_bytes, facts.scene, facts.bytes_of(SAVED)
    total = facts.of_total
    # a small graph may be left from anything that ran before
    computes = scene.is_forward or 4 * saved > wanted
    trains = facts.trains or (computes and scene.is_recording and not scene.all_in_eval)
    evidence = f"What the batch makes takes {format_bytes(n_bytes)}."
    if wanted > (facts.total_bytes or 2 * max(1, facts.used_bytes)):
        what = f"one tensor takes {format_bytes(wanted)}{total}"
        remedy = "Use a smaller batch, or adaptive.step()." if trains else "Use chunked()."
        in_use = format_bytes(facts.used_bytes)
        evidence = f"{format_bytes(wanted)} is wanted at once, {in_use} is in use."
        return "batch", what, _of_one(scene.batch_size) or remedy, evidence
    if scene.all_in_eval and saved > n_bytes // 4:
        what = f"graphs take {format_bytes(saved)} in eval()"
        evidence = f"The modules are in eval mode, and autograd saved {format_bytes(saved)}."
        return "batch", what, "Use torch.no_grad().", evidence
    if again := runs_again(facts.entries):
        state = next((v.name for v in scene.variables if v.is_carried and not v.is_past), "state")
        evidence = (
            f"The same is saved {again} times, more than there are weights: a state that goes "
            "from step to step, or from batch to batch, keeps the graphs of all."
        )
        return "endless", f"{format_bytes(n_bytes)}{total}", f"Use {state}.detach().", evidence
    if (data := _largest_variable(facts)) is not None:
        what = f"{shortened(short(data.name))} alone takes {format_bytes(data.n_bytes)}{total}"
        evidence = (
            f"{what}: keep it on the host or on disk (torch.load(mmap=True)), and move a part at a "
            "time."
        )
        return "data", what, "Take it in parts.", evidence
    remedy = "Use tenure.adaptive.step()." if saved or trains else "Use @chunked()."
    if saved:
        evidence = f"Autograd saved {format_bytes(saved)} for the backward pass of this batch."
    what = f"it takes {format_bytes(n_bytes)}{total}"
    return "batch", what, _of_one(scene.batch_size) or remedy, evidence


def _of_one(batch_size: int) -> str:
    """What helps a batch that can't be smaller."""
    return "Shorten its input, or use torch.utils.checkpoint." if batch_size == 1 else ""


def _largest_variable(facts: Facts) -> TensorRow | None:
    """Return a tensor of at least half of all bytes that a variable outside forward() holds."""
    found = (
        entry.owner
        for entry in facts.entries
        if entry.owner.category == OTHERS
        and entry.kind in _VARIABLES
        and 2 * entry.owner.n_bytes >= facts.all_bytes
        and OF_FORWARD not in entry.owner.name
    )
    return next(found, None)
