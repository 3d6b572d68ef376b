"""Verdicts on things that are kept without use: cause, culprit and remedy, and the evidence."""

from __future__ import annotations

import re
from dataclasses import replace

from tenure._text import counted, describe_elements, format_bytes

from .._reports import place_of
from ._facts import Facts
from ._piles import CACHE_OF, IN_FRAME, Pile
from ._verdict import Cause, Verdict, short
from ._work import line_of, trains

_LINK = re.compile(r"(\.\w+)\.…")
_CYCLE_OF_ITERTOOLS = "(inside a cycle)"


def verdict_of(pile: Pile, facts: Facts) -> Verdict:
    """Return the verdict on a pile."""
    # what grows beside training is no result of it: nothing can be run in pieces there
    if pile.kind == "results" and not pile.graph_bytes and trains(facts):
        pile = replace(pile, kind="leak")
    share = f"{pile.n_bytes / max(1, facts.used_bytes):.0%} of what was in use"
    size = format_bytes(pile.n_bytes)
    if pile.kind in _TOLD:
        return _TOLD[pile.kind](pile, facts, size, share)
    return _of_graphs(pile, size, share) if pile.graph_bytes else _of_tensors(pile, size, share)


def _told(pile: Pile, head: str, evidence: str, more: str, cause: Cause = "leak") -> Verdict:
    return Verdict(cause, pile.n_bytes, head, (evidence, more))


def _of_cycle(pile: Pile, facts: Facts, size: str, share: str) -> Verdict:
    scene = facts.scene
    evidence = f"Nothing but itself refers to {pile.place}, and what it holds: {size}, {share}."
    if pile.place.endswith(".grad") and scene.created_at:
        at = line_of(scene.created_at)
        return _told(
            pile,
            f"Reference cycle: backward(create_graph=True) at {at} left {size} of gradients with "
            "graphs. Set .grad = None after it.",
            f"{size} of gradients, and of graphs that refer to their parameters: {share}.",
            "A gradient with a graph refers to its parameter, and that to the gradient: no "
            "collector sees it. Use torch.autograd.grad(), or set each .grad to None.",
            "cycle",
        )
    return _told(
        pile,
        f"Reference cycle: {short(pile.place)}, {size} of garbage. Break it, call gc.collect(), "
        "or open a scope around it.",
        evidence,
        "gc.collect() frees it now; a tenure scope around what makes it frees it at its end; a "
        "weak reference in the place of one of the links breaks it, and of an autograd.Function "
        "ctx.save_for_backward() in the place of an attribute.",
        "cycle",
    )


def _of_traceback(pile: Pile, facts: Facts, size: str, share: str) -> Verdict:
    return _told(
        pile,
        f"Kept exception: {_keeper_of(pile.place)} holds {size} by its traceback. "
        "Keep str(error), not the error.",
        f"{pile.place}: {size}, {share}.",
        "Retry after the except block, not in it; clear what keeps the error, or its frames with "
        "traceback.clear_frames(error.__traceback__). A record of logging with exc_info=, a task "
        "and a future keep it as well.",
        "traceback",
    )


def _keeper_of(place: str) -> str:
    """Who keeps an exception; without a keeper, the function that it was raised in."""
    _, _, keeper = place.partition(", held by ")
    # of a coroutine, say, the variable; what holds that is further away
    keeper = keeper.partition(", held by ")[0] or IN_FRAME.split(place)[0]
    named = short(place_of(keeper.rpartition(": local ")[2]))
    function = IN_FRAME.search(place)
    raised = f"the error of {function[0].split()[1].rstrip(':')}" if function else "an error"
    return raised if not keeper or named.startswith(("traceback of ", "frame")) else named


def _of_gradients(pile: Pile, facts: Facts, size: str, share: str) -> Verdict:
    n = f" of {counted(pile.n_tensors, 'model')}" if pile.n_tensors > 1 else ""
    return _told(
        pile,
        f"Gradients: {short(pile.place)} keeps {size}{n} that no step needs. "
        "Call zero_grad(set_to_none=True) after its last step.",
        f"Gradients of {pile.place} take {size}, {share}, and what ran reads none of them.",
        "A gradient lives until it is set to None: clear them after each step, before the next "
        "forward pass, and once more when the training of a model has ended.",
        "gradients",
    )


def _of_joined(pile: Pile, facts: Facts, size: str, share: str) -> Verdict:
    at = f" at {line_of(pile.site)}" if line_of(pile.site) else ""
    others = f" (and {counted(pile.n_places - 1, 'other')})" if pile.n_places > 1 else ""
    return _told(
        pile,
        f"Leak: {short(pile.place)}{others} grows by torch.cat{at}, {size} after "
        f"{pile.n_tensors} times. "
        "Bound it, or move it to the host.",
        f"{pile.place} was joined with more {pile.n_tensors} times in a row: {size}, {share}. Each "
        "time it is there twice.",
        "Keep the last n of it, or write into a tensor that is made once; what is only gathered "
        "belongs on the host (.cpu()) or into @tenure.adaptive.chunked(collect=...).",
    )


def _of_views(pile: Pile, facts: Facts, size: str, share: str) -> Verdict:
    shown = format_bytes(pile.shown_bytes)
    copied = ".copy()" if "numpy array" in pile.place else ".clone()"
    return _told(
        pile,
        f"Leak: {short(pile.place)} keeps {size} by {counted(pile.n, 'view')} that show {shown}. "
        f"Keep {copied} of each.",
        f"{pile.place} keeps {size}, {share}; what it shows of it takes {shown}.",
        "A view, and an array of NumPy over a tensor, keep the whole storage: keep a clone() or "
        "copy() of the part that is needed.",
    )


def _of_copies(pile: Pile, facts: Facts, size: str, share: str) -> Verdict:
    return _told(
        pile,
        f"Leak: {short(pile.place)} keeps copies of weights or gradients, {size}. "
        "Bound it, or keep them on the host or on disk.",
        f"{pile.place} keeps {counted(pile.n, 'tensor')} with the shapes of "
        f"weights: {size}, {share}.",
        "Save weights with torch.save(), copy with .cpu(), or keep the last and the best only.",
    )


def _of_optimizers(pile: Pile, facts: Facts, size: str, share: str) -> Verdict:
    return _told(
        pile,
        f"Leak: {short(pile.place)} keeps {counted(pile.n, 'optimizer')} with {size} of state. "
        "Bound it, or del the old ones.",
        f"{pile.place} keeps {counted(pile.n, 'optimizer')}: {size}, {share}.",
        "An optimizer that steps no more needs no state: keep its settings, or what you report.",
    )


def _of_parts(pile: Pile, facts: Facts, size: str, share: str) -> Verdict:
    return _told(
        pile,
        f"Leak: {pile.place} got {counted(pile.n, 'module')} while it trained, {size}. "
        "Bound it, or move those without use to the host.",
        f"{pile.place} gets a module now and then: {size} with their gradients, {share}.",
        "Make them before training, drop the old ones (del), or keep them with .to('cpu').",
    )


def _of_carried(pile: Pile, facts: Facts, size: str, share: str) -> Verdict:
    at = line_of(facts.scene.retained_at)
    kept = f" (retain_graph=True at {at})" if at else ""
    steps = [each.n_steps for each in facts.scene.variables if each.name == pile.place]
    if "[…]" in pile.place:
        remedy = "Go on with t.detach() of each of its tensors."
    elif pile.is_scalar and not any(steps) and facts.scene.calls_backward:
        remedy = f"Call backward() on each, or add {pile.place}.item()."
    else:
        remedy = f"Go on with {pile.place}.detach(){', or .item()' if pile.is_scalar else ''}."
    return _told(
        pile,
        f"Leak: {pile.place} carries its graph from step to step, {size}{kept}. {remedy}",
        f"The graph of {pile.place} has saved {size}, {share}; it goes back over "
        f"{counted(max(2, pile.n), 'step')}.",
        "Detach what goes on from step to step, or run it under torch.no_grad() where nothing is "
        "trained; retain_graph=True is then not needed.",
    )


def _of_past(pile: Pile, facts: Facts, size: str, share: str) -> Verdict:
    at = line_of(facts.scene.retained_at)
    if not trains(facts):
        remedy = f"Use torch.no_grad(), or del {pile.place} first."
    elif at:
        remedy = f"Leave out retain_graph=True ({at}), or del {pile.place} first."
    else:
        remedy = f"Call backward() on it, or del {pile.place} first."
    return _told(
        pile,
        f"Leak: {pile.place} still holds the graph of the previous step, {size}. {remedy}",
        f"Nothing reads {pile.place} again before it is bound anew, and its graph has saved "
        f"{size}, {share}: two steps are in memory at once.",
        "A variable lives until it is bound anew, which is after the next forward pass has run.",
    )


def _of_casts(pile: Pile, facts: Facts, size: str, share: str) -> Verdict:
    at = f" around {pile.place}" if pile.place else ""
    return _told(
        pile,
        f"Leak: autocast{at} keeps {size} of weights that it has cast. "
        "Use autocast(cache_enabled=False), or a block for each batch.",
        f"About {size} of {facts.scene.autocast_dtype} copies of weights live until the autocast "
        "block ends.",
        "model.bfloat16() in the place of autocast has no second copy of any weight.",
    )


def _of_cached(pile: Pile, facts: Facts, size: str, share: str) -> Verdict:
    called = CACHE_OF.search(pile.place)
    name = short(called[1]) if called else "it"
    return _told(
        pile,
        f"Leak: lru_cache of {name} keeps {counted(pile.n, 'result')}, {size}. "
        f"Lower its maxsize=, or call {name}.cache_clear().",
        f"{pile.place} keeps {counted(pile.n, 'tensor')}: {size}, {share}.",
        "functools.cache is an lru_cache(maxsize=None), which keeps every result and argument: use "
        "lru_cache(maxsize=8), or let the function return what is no tensor.",
    )


def _of_cycled(pile: Pile, size: str, share: str) -> Verdict:
    name = short(pile.place.partition(f" {_CYCLE_OF_ITERTOOLS}")[0])
    return _told(
        pile,
        f"Leak: {name} is an itertools.cycle and keeps each batch, {size}. "
        "Use `while True: for batch in loader`.",
        f"{pile.place} keeps {counted(pile.n, 'tensor')}: {size}, {share}.",
        "itertools.cycle() remembers all that it has given, to give it again.",
    )


_TOLD = {
    "cycle": _of_cycle,
    "traceback": _of_traceback,
    "gradients": _of_gradients,
    "joined": _of_joined,
    "views": _of_views,
    "copies": _of_copies,
    "optimizers": _of_optimizers,
    "parts": _of_parts,
    "carried": _of_carried,
    "past": _of_past,
    "casts": _of_casts,
    "cached": _of_cached,
}


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
    if _CYCLE_OF_ITERTOOLS in pile.place:
        return _of_cycled(pile, size, share)
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
    if pile.are_models:
        return _told(
            pile,
            _head("Leak", name, n, size, "Bound it, or keep them on the host or on disk."),
            evidence,
            "Keep the best alone, save each with torch.save(model.state_dict()), or move it with "
            ".cpu(); its gradients and its optimizer's state go with it.",
        )
    link = _LINK.search(name)
    remedy = "Bound it." if link is None else f"Set {link[1]} to None in time."
    return Verdict(
        "leak",
        pile.n_bytes,
        _head("Leak", name, n, size, remedy),
        (
            evidence,
            "Bound it (a deque with maxlen=, an lru_cache with maxsize=), keep numbers, or remove "
            "the hook that fills it; a tenure scope around the step lets go of what outlives it.",
        ),
    )


def _head(label: str, name: str, n: str, size: str, remedy: str) -> str:
    return f"{label}: {name} keeps {n}, {size}. {remedy}"
