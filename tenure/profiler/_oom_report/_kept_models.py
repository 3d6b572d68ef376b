"""What models and optimizers keep without use: old ones, their gradients, parts that only grow.

Weights, gradients and state have names of their own in a census; who keeps a model is asked here.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from tenure._heap import find_holders, instances, is_kind, tracked_objects, type_name
from tenure._storages import storage_bytes
from tenure._text import counted, format_bytes

from .._owners import GRADIENTS, SAVED, outermost
from .._reports import place_of
from ._facts import Facts
from ._kept import is_fixed, spelled
from ._kept_graphs import FEWEST_TENSORS, line_of
from ._kinds import Candidate
from ._scene import Scene, state_bytes_of

# So many steps of others after its own, an optimizer steps no more.
_STEPS_BACK = 2


def kept_models(facts: Facts) -> Iterator[Candidate]:
    """Places that keep several models or optimizers, gradients without use, and growing modules."""
    found = instances(tracked_objects(), lambda cls: is_kind(cls, nn.Module, Optimizer))
    modules = instances(found, lambda cls: is_kind(cls, nn.Module))
    optimizers = instances(found, lambda cls: is_kind(cls, Optimizer))
    models = [module for module in outermost(modules) if _bytes_on(module, facts.device)]
    # none of ours but these lists holds a model while it is asked who does
    del found, modules
    yield from _growing(models, facts)
    yield from _untrained(optimizers, facts)
    states = _states(optimizers)
    stepped = _stepped(optimizers, facts)
    sizes = [
        _bytes_on(each, facts.device) + sum(states.get(id(p), 0) for p in each.parameters())
        for each in models
    ] + list(map(state_bytes_of, optimizers))
    idle = [
        _idle_bytes(each, facts.device, stepped) if facts.noted.n_steps else 0 for each in models
    ]
    idle += [0] * len(optimizers)
    objects = [*models, *optimizers]
    idle += [0] * (len(objects) - len(idle))
    alike = Counter(id(type(each)) for each, n_bytes in zip(objects, sizes, strict=True) if n_bytes)
    asked = [
        i
        for i, each in enumerate(objects)
        if idle[i] or (sizes[i] and alike[id(type(each))] >= FEWEST_TENSORS)
    ]
    subjects = [objects[i] for i in asked]
    held = find_holders(subjects, ignore=(models, optimizers, objects)) if subjects else []
    by_place: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for i, subject, holders in zip(asked, subjects, held, strict=True):
        # parts of a model that is being made are in a tuple on its way: nothing keeps them
        if not holders or holders[0].kind == "unknown":
            continue
        # `self` of what runs is called by its class, which says less than any other variable
        own = type_name(type(subject))
        best = next((each for each in holders if each.named and each.chain != own), holders[0])
        place = spelled(place_of(best.chain), facts.scene)
        if best.kind == "cycle":
            by_place["cycle", own].append(sizes[i])
        # one variable keeps one model, and no pile; its gradients may be without use all the same
        elif "[…]" in place and sizes[i] and alike[id(type(subject))] >= FEWEST_TENSORS:
            by_place["models" if i < len(models) else "optimizers", place].append(sizes[i])
        if idle[i]:
            by_place["gradients", place].append(idle[i])
    yield from _told(by_place, facts.scene)
    if not any(idle):
        yield from _own_gradients(facts)


def _told(by_place: dict[tuple[str, str], list[int]], scene: Scene) -> Iterator[Candidate]:
    leaks = {place for kind, place in by_place if kind == "models" and not is_fixed(place, scene)}
    for (kind, place), sizes in by_place.items():
        n = len(sizes)
        # a container that the program adds nothing to is no pile
        is_wanted = place not in leaks if kind == "models" else kind != "cycle" and place in leaks
        if is_wanted or (kind != "gradients" and n < FEWEST_TENSORS - 1):
            continue
        noun = "optimizer" if kind == "optimizers" else "model"
        words = {
            "name": place,
            "n": n,
            "of": f" of {counted(n, noun)}" if n > 1 else "",
        }
        yield Candidate(kind, sum(sizes), words)


def _growing(models: list[nn.Module], facts: Facts) -> Iterator[Candidate]:
    """Modules inside others that got parts while the program trained."""
    for model in models:
        for name, module in list(model.named_modules()):
            times = facts.noted.times_of(module)
            late = [key for key, time in times.items() if time > min(times.values())]
            if len(set(times.values())) < FEWEST_TENSORS or len(late) < FEWEST_TENSORS:
                continue
            parts = [part for key, part in module.named_children() if key in late]
            place = ".".join(filter(None, (type_name(type(model)), name)))
            n_bytes = sum(_bytes_on(part, facts.device) for part in parts)
            yield Candidate("parts", n_bytes, {"name": place, "n": len(parts)})


def _untrained(optimizers: list[Any], facts: Facts) -> Iterator[Candidate]:
    """Graphs of a model in training that no optimizer steps, as of a teacher."""
    scene = facts.scene
    model = None if scene.model is None else scene.model()
    known = {id(p) for each in optimizers for p in _parameters_of(each)}
    if model is None or not known or not (scene.is_recording and scene.has_own_graph):
        return
    own = list(model.parameters())
    if any(p.requires_grad for p in own) and known.isdisjoint(map(id, own)):
        saved = facts.bytes_of(SAVED)
        line = line_of(scene.site)
        words = {
            "at": f"{line}: " if line else "",
            "model": f"the {type_name(type(model))}",
            "evidence": f"Autograd saved {format_bytes(saved)}, also for weights that stay.",
        }
        yield Candidate("untrained", saved, words)


def _parameters_of(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _states(optimizers: list[Any]) -> dict[int, int]:
    """What optimizers keep for each parameter, by its identity."""
    found: defaultdict[int, int] = defaultdict(int)
    for optimizer in optimizers:
        share = state_bytes_of(optimizer) // max(1, len(optimizer.state))
        for parameter in optimizer.state:
            found[id(parameter)] += share
    return found


def _stepped(optimizers: list[Any], facts: Facts) -> set[int]:
    """The identities of the parameters that an optimizer steps, or may begin to."""
    oldest = facts.noted.n_steps - _STEPS_BACK * max(1, len(optimizers))
    return {
        id(p)
        for optimizer in optimizers
        if facts.noted.last_steps.get(optimizer, facts.noted.n_steps) > oldest
        for p in _parameters_of(optimizer)
    }


def _idle_bytes(module: nn.Module, device: str, stepped: set[int]) -> int:
    gradients = (p.grad for p in module.parameters() if id(p) not in stepped)
    found = (g for g in gradients if g is not None and str(g.device) == device)
    return sum(storage_bytes(g) or 0 for g in found)


def _bytes_on(module: Any, device: str) -> int:
    try:
        tensors = [*module.parameters(), *module.buffers()]
        tensors += [p.grad for p in tensors if p.grad is not None]
    # one that is being made has no registries yet
    except AttributeError:
        return 0
    return sum(storage_bytes(t) or 0 for t in tensors if str(t.device) == device)


def _own_gradients(facts: Facts) -> Iterator[Candidate]:
    """Gradients of the last step, while a forward runs that does not need them."""
    sizes: Counter[str] = Counter()
    for entry in facts.entries:
        if entry.owner.category == GRADIENTS:
            sizes[entry.owner.name.partition(".")[0]] += entry.owner.n_bytes
    if facts.scene.is_forward and not facts.scene.is_backward:
        for name, _ in sizes.most_common(1):
            yield Candidate("gradients", sizes.total(), {"name": name, "of": ""})
