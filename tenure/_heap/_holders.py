"""Who holds a tensor, ranked; nothing that was looked at is kept once the answer is given."""

import gc
import itertools
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tenure._text import counted
from tenure._torch.quiet import without_functions

from ._chains import Chain, Chains
from ._frames import RunningFrames
from ._search import Balance, Edge, Search
from ._words import Step

# kinds whose holder may be a plain variable itself, with as many steps as that takes
_BORROWED = {"view": 1, "autograd": 1, "numpy": 1, "closure": 3}


@dataclass(frozen=True, slots=True)
class Holder:
    """One reference that keeps a tensor alive, named from something that is alive by itself.

    A local variable is spelled ``train.<locals>.history`` with the qualified name of its function,
    ``self`` as the name of its class, a global ``module.NAME`` (``__main__.NAME`` in a script). Of
    an ``nn.Module`` the chain shows dotted names from the outermost module on, as in
    ``Model.encoder.layers[0].weight, held by train.<locals>.model``.

    Attributes:
        kind: the most telling of what is on the chain: "autograd", "view", "numpy", "traceback",
            "generator" (coroutines too), "closure", "default", "partial", "method" (bound), "cache"
            (`functools.lru_cache`), "context" (`contextvars`), "thread", "global", "attribute",
            "container", "frame-local"; or "cycle" for garbage that waits for the collector, and
            "unknown" where a reference has no name.
        chain: the names from the root to the tensor.
        running: a frame that runs on this thread holds the tensor as a plain local variable. Its
            function's captured variable, a tuple that is a variable, a view of all of the tensor,
            or a view, array or graph beside a variable of the tensor itself, count as that
            variable.
        graph: what holds the graph of autograd that the chain goes through; empty without one.
        named: false where the chain only counts references that have no name.
    """

    kind: str
    chain: str
    running: bool
    graph: str = ""
    named: bool = True


def find_holders(
    objects: Sequence[object],
    *,
    ignore: Collection[object] = (),
    live: list[torch.Tensor] | None = None,
) -> list[list[Holder]]:
    """Name every reference that keeps objects alive, with a few passes over the heap for all.

    No operation on a tensor runs, no unpack hook of autograd and no code of the objects passed.

    Args:
        objects: tensors of any shape, dtype, layout and device; modules, and any other objects.
        ignore: containers that do not count as holders, such as the caller's own lists.
        live: the caller's list of all tensors with a handle in Python, which is no holder either;
            it spares a pass over the heap.

    Returns:
        For each object its holders: those whose chain is a name first, the shortest first.
    """
    with without_functions(), _collector_paused():
        search = Search(objects, (objects, *ignore), RunningFrames(sys._getframe(1)), live)
        chains = Chains(search)
        return [_holders_of(n, search, chains) for n in search.targets]


def weigh_holders(found: object) -> tuple[list[Holder], Balance]:
    """As `find_holders` for one object of any kind, with the balance of the references to it."""
    ours = [found]
    with without_functions(), _collector_paused():
        # from this very frame on: its argument is a reference as well
        search = Search(ours, (ours,), RunningFrames(sys._getframe()))
        (n,) = search.targets
        return _holders_of(n, search, Chains(search)), search.balance(n)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Keep garbage and finalizers where they are, so that the same heap gives the same answer."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _holders_of(n: int, search: Search, chains: Chains) -> list[Holder]:
    direct = [Chain(root, ()) for root in search.roots[n] if not root.silent]
    through = [found for edge in search.parents[n] if (found := _through(edge, n, chains))]
    ranked = [*((0, chain) for chain in direct), *through]
    ranked.sort(key=lambda entry: (entry[0], *_rank(entry[1])))
    variables = [chain for rank, chain in ranked if rank == 0 and _is_variable(chain)]
    holders = [
        Holder(chain.kind, str(chain), rank == 0 and _is_running(chain, variables), chain.graph)
        for rank, chain in ranked
    ]
    return [*dict.fromkeys(holders), *_unnamed(search.unexplained(n))]


def _rank(chain: Chain) -> tuple[int, bool, str]:
    """Short before long; where equal, what the user wrote before what torch keeps."""
    return len(chain.steps), chain.kind in _BORROWED, str(chain)


def _through(edge: Edge, n: int, chains: Chains) -> tuple[int, Chain] | None:
    """The chain that ends in an edge; behind the others if no root or only a cycle holds it."""
    chain = chains.through(edge, n)
    if chain is not None:
        return int(chain.root.kind == "cycle"), chain
    loose = chains.loose(edge)
    return None if loose is None else (1, loose)


def _is_variable(chain: Chain) -> bool:
    """Whether a tensor is the value of a variable, or an item of a tuple that is."""
    return chain.root.running and not _unfrozen(chain)


def _is_running(chain: Chain, variables: list[Chain]) -> bool:
    steps = _unfrozen(chain)
    if not chain.root.running or not steps:
        return chain.root.running
    first = steps[0]
    if _BORROWED.get(first.kind) != len(steps):
        return False
    if first.kind == "closure":
        return any(variable.root.captured for variable in variables)
    return first.whole or bool(variables)


def _unfrozen(chain: Chain) -> list[Step]:
    """The steps of a chain from the first that leaves no tuple."""
    return list(itertools.dropwhile(lambda step: step.frozen, chain.steps))


def _unnamed(count: int) -> list[Holder]:
    if not count:
        return []
    chain = (
        f"{counted(count, 'reference')} without a name: a value on its way, or an extension module"
    )
    return [Holder("unknown", chain, running=False, named=False)]
