"""What models and optimizers keep without use: old ones, their gradients, parts that only grow.

Weights, gradients and state have names of their own in a census; who keeps a model is asked here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from tenure._heap import find_holders, instances, is_kind, tracked_objects, type_name
from tenure._storages import storage_bytes

from .._owners import outermost
from .._reports import place_of
from ._notes import Notes
from ._piles import FEWEST_TENSORS, Pile, PileKind
from ._scene import state_bytes_of

# So many steps of others after its own, an optimizer steps no more.
_STEPS_BACK = 2


def piles_of_models(
    device: str, notes: Notes, last_steps: Mapping[Optimizer, int], steps: int
) -> tuple[Pile, ...]:
    """Places that keep several models or optimizers, gradients without use, and growing modules.

    Args:
        device: where the weights count.
        notes: what was noted of modules that got parts.
        last_steps: for each optimizer the number of its last step.
        steps: how many steps there were.
    """
    found = instances(tracked_objects(), lambda cls: is_kind(cls, nn.Module, Optimizer))
    modules = instances(found, lambda cls: is_kind(cls, nn.Module))
    optimizers = instances(found, lambda cls: is_kind(cls, Optimizer))
    models = [module for module in outermost(modules) if _bytes_on(module, device)]
    states = _states(optimizers)
    stepped = _stepped(optimizers, last_steps, steps)
    parts = list(_growing(models, notes, device))
    # none of ours but these lists holds a model while it is asked who does
    del found, modules
    sizes = [_bytes_on(each, device) + _bytes_in(states, each) for each in models]
    idle = [_idle_bytes(each, device, stepped) if steps else 0 for each in models]
    piles = [
        *_piles(models, sizes, "leak"),
        *_piles(models, idle, "gradients", fewest=1),
        *_piles(optimizers, list(map(state_bytes_of, optimizers)), "optimizers"),
        *parts,
    ]
    return tuple(sorted(piles, key=lambda pile: -pile.n_bytes))


def _piles(
    objects: list[Any], sizes: list[int], kind: PileKind, fewest: int = FEWEST_TENSORS
) -> list[Pile]:
    """Places that keep several objects of one class."""
    by_class: defaultdict[int, list[int]] = defaultdict(list)
    for i, n_bytes in enumerate(sizes):
        if n_bytes:
            by_class[id(type(objects[i]))].append(i)
    found: list[Pile] = []
    for numbers in by_class.values():
        if len(numbers) >= fewest:
            same = [objects[i] for i in numbers]
            found += _places_of(same, [sizes[i] for i in numbers], kind, fewest, objects)
    return found


def _places_of(
    objects: list[Any], sizes: Sequence[int], kind: PileKind, fewest: int, others: list[Any]
) -> list[Pile]:
    places: dict[str, Pile] = {}
    for i, held in enumerate(find_holders(objects, ignore=(objects, others))):
        # parts of a model that is being made are in a tuple on its way: nothing keeps them
        if not held or held[0].kind == "unknown":
            continue
        # `self` of what runs is called by its class, which says less than any other variable
        own = type_name(type(objects[i]))
        best = next((each for each in held if each.named and each.chain != own), held[0])
        holder, chain = best.kind, best.chain
        place = "" if holder == "cycle" else place_of(chain)
        # one variable keeps one model, and no pile; its gradients may be without use all the same
        if holder != "cycle" and place == chain and fewest > 1:
            continue
        pile = places.setdefault(place, Pile(place, "cycle" if not place else kind))
        pile.place = place or own
        pile.own_bytes += sizes[i]
        pile.n_tensors += 1
        pile.are_models = True
    return [pile for pile in places.values() if pile.n_tensors >= max(1, fewest - 1)]


def _growing(models: list[nn.Module], notes: Notes, device: str) -> Iterator[Pile]:
    """Modules inside others that got parts while the program trained."""
    for model in models:
        for name, module in list(model.named_modules()):
            times = notes.times_of(module)
            late = [key for key, time in times.items() if time > min(times.values())]
            if len(set(times.values())) < FEWEST_TENSORS or len(late) < FEWEST_TENSORS:
                continue
            parts = [part for key, part in module.named_children() if key in late]
            place = ".".join(filter(None, (type_name(type(model)), name)))
            n_bytes = sum(_bytes_on(part, device) for part in parts)
            yield Pile(place, "parts", n_bytes, n_tensors=len(parts), are_models=True)


def _states(optimizers: list[Any]) -> dict[int, int]:
    """What optimizers keep for each parameter, by its identity."""
    found: defaultdict[int, int] = defaultdict(int)
    for optimizer in optimizers:
        n_parameters = max(1, len(optimizer.state))
        for parameter in optimizer.state:
            found[id(parameter)] += state_bytes_of(optimizer) // n_parameters
    return found


def _stepped(
    optimizers: list[Any], last_steps: Mapping[Optimizer, int], steps: int
) -> frozenset[int]:
    """The identities of the parameters that an optimizer steps, or may begin to."""
    oldest = steps - _STEPS_BACK * max(1, len(optimizers))
    return frozenset(
        id(p)
        for optimizer in optimizers
        if last_steps.get(optimizer, steps) > oldest
        for group in optimizer.param_groups
        for p in group["params"]
    )


def _idle_bytes(module: nn.Module, device: str, stepped: frozenset[int]) -> int:
    gradients = (p.grad for p in module.parameters() if id(p) not in stepped)
    found = (g for g in gradients if g is not None and str(g.device) == device)
    return sum(storage_bytes(g) or 0 for g in found)


def _bytes_in(states: Mapping[int, int], module: nn.Module) -> int:
    return sum(states.get(id(p), 0) for p in module.parameters())


def _bytes_on(module: Any, device: str) -> int:
    try:
        tensors = [*module.parameters(), *module.buffers()]
        tensors += [p.grad for p in tensors if p.grad is not None]
    # one that is being made has no registries yet
    except AttributeError:
        return 0
    return sum(storage_bytes(t) or 0 for t in tensors if str(t.device) == device)
