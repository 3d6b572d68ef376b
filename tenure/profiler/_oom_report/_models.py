"""Models that are kept, or that wait as garbage: their weights have names, and no holder of theirs.

Each trial of a search makes a model; what keeps the old ones keeps all their weights.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import nn

from tenure._heap import find_holders, instances, is_kind, tracked_objects
from tenure._storages import storage_bytes

from .._owners import outermost
from .._reports import place_of
from ._piles import FEWEST_TENSORS, Pile


def piles_of_models(device: str) -> tuple[Pile, ...]:
    """Places that keep several models of one class, and those of a class that are garbage.

    Args:
        device: where the weights count.
    """
    found = instances(tracked_objects(), lambda cls: is_kind(cls, nn.Module))
    by_class: defaultdict[int, list[nn.Module]] = defaultdict(list)
    for module in outermost(found):
        if _bytes_on(module, device):
            by_class[id(type(module))].append(module)
    # none of ours but this one holds a model while it is asked who does
    del found
    piles: list[Pile] = []
    for models in list(by_class.values()):
        if len(models) >= FEWEST_TENSORS:
            piles += _piles(models, device)
    return tuple(sorted(piles, key=lambda pile: -pile.n_bytes))


def _piles(models: list[nn.Module], device: str) -> list[Pile]:
    places: dict[str, Pile] = {}
    for i, held in enumerate(find_holders(models, ignore=(models,))):
        # parts of a model that is being made are in a tuple on its way: nothing keeps them
        if not held or held[0].kind == "unknown":
            continue
        kind, chain = held[0].kind, held[0].chain
        place = "" if kind == "cycle" else place_of(chain)
        if kind != "cycle" and place == chain:
            continue
        pile = places.setdefault(place, Pile(place, kind="cycle" if not place else "leak"))
        pile.place = place or type(models[i]).__name__
        pile.own_bytes += _bytes_on(models[i], device)
        pile.n_tensors += 1
        pile.are_models = True
    return [pile for pile in places.values() if pile.n_tensors >= FEWEST_TENSORS - 1]


def _bytes_on(module: Any, device: str) -> int:
    try:
        tensors = [*module.parameters(), *module.buffers()]
        tensors += [p.grad for p in tensors if p.grad is not None]
    # one that is being made has no registries yet
    except AttributeError:
        return 0
    return sum(storage_bytes(t) or 0 for t in tensors if str(t.device) == device)
