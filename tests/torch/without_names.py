"""Uses tenure in a torch that lacks a private name; run by test_private_names.py.

Gets, as JSON, uses by name, and prints what each raised, by name: the missing name that an error
tells, the text of another error, None if there was none. A name is taken away from tenure where it
was bound, which is what its absence at import comes to; what is made of names at import is tried by
an import without any of them.
"""

import functools
import importlib
import json
import logging
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from torch import nn

import tenure._torch

ROOMS = ("scopes", "adaptive", "adaptive._predict._scratch", "profiler", "paging", "testing")
bindings = {}


def record(bind):
    def recording(path, purpose):
        made = bind(path, purpose)
        bindings.setdefault(path, (made, tenure._torch._stand_in(path, purpose)))
        return made

    return recording


def load_rooms():
    for room in ROOMS:
        importlib.import_module(f"tenure.{room}")


def scope():
    with tenure.scopes.DisposeScope():
        made = torch.ones(2) + 1
    assert tenure.scopes.is_disposed(made)


def backward_in_a_scope():
    leaf = torch.ones(2, requires_grad=True)
    with tenure.scopes.DisposeScope():
        product = leaf * leaf
        product.register_hook(lambda gradient: gradient * 1)
        product.sum().backward()
    assert leaf.grad is not None


def retry():
    done = []

    def work(start, end):
        if end - start > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        done.append(end)

    tenure.adaptive.simple.range(work, 0, 4, 4)
    assert done == [2, 4]


def budget():
    with tenure.adaptive.memory_budget("1KiB") as made:
        kept = torch.ones(4)
    assert made.live_bytes == kept.nbytes


def step():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1), nn.Linear(2, 1))
    tenure.adaptive.step(lambda part: model(part).mean(), torch.ones(4, 2), maximum=2)
    assert model[0].weight.grad is not None


def lines():
    def work():
        return torch.ones(8).sum()

    with tenure.profiler.LineProfiler(work, device="cpu") as profiler:
        work()
    assert len(profiler.records)


def holders():
    kept = torch.ones(2)
    assert tenure.profiler.holders(kept)


def saved():
    leaf = torch.ones(2, requires_grad=True)
    assert tenure.profiler.saved_for_backward(leaf * leaf)


def paged():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
    with (
        tempfile.TemporaryDirectory() as folder,
        tenure.paging.page(model, "cpu", host=Path(folder)),
        torch.no_grad(),
    ):
        model(torch.ones(1, 2))


def sparse_in_a_budget():
    with tenure.adaptive.memory_budget("1MiB"):
        torch.ones(2).to_sparse()


def prediction():
    model = nn.Linear(2, 2)
    assert tenure.adaptive.predict_peak(lambda x: model(x).sum(), torch.ones(4, 2)).peak_bytes


def container():
    class Pair:
        def __init__(self, *items):
            self.items = items

    torch.utils._pytree.register_pytree_node(Pair, lambda p: (p.items, None), lambda i, _: Pair(*i))
    try:
        with tenure.scopes.DisposeScope():
            made = tenure.scopes.move_to_outer(Pair(torch.ones(1)))
        assert not tenure.scopes.is_disposed(made.items[0])
    finally:
        torch.utils._pytree.SUPPORTED_NODES.pop(Pair)


USES = {
    use.__name__: use
    for use in (
        scope, backward_in_a_scope, container, retry, budget, sparse_in_a_budget, step, lines,
        holders, saved, paged, prediction,
    )
}  # fmt: skip


def tried(names):
    """What each use raises."""
    found = {}
    for name in names:
        found[name] = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                USES[name]()
            except tenure.MissingTorchNameError as error:
                found[name] = error.name
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
    return found


def without(path, uses):
    """What uses raise while no module of tenure has what torch has under a name."""
    found, stand_in = bindings[path]
    modules = [module for name, module in sys.modules.items() if name.startswith("tenure.")]
    places = [(m, name) for m in modules for name, value in vars(m).items() if value is found]
    for module, name in places:
        setattr(module, name, stand_in)
    for module in modules:
        for value in vars(module).values():
            if type(value) is functools._lru_cache_wrapper and "tenure._torch." in value.__module__:
                value.cache_clear()
    try:
        return tried(uses)
    finally:
        for module, name in places:
            setattr(module, name, found)


def without_all():
    """The rooms, imported anew where torch has no private name at all."""
    for name in [name for name in sys.modules if name.startswith("tenure")]:
        del sys.modules[name]
    names = importlib.import_module("tenure._torch")
    names.optional = lambda path: None
    globals()["tenure"] = importlib.import_module("tenure")
    load_rooms()
    return tried(USES)


wanted = json.load(sys.stdin)
logging.disable()
for bind in ("bound", "getter"):
    setattr(tenure._torch, bind, record(getattr(tenure._torch, bind)))
load_rooms()
result = {"": tried(USES)}
if wanted is not None:
    # every name that is bound is tried, also one that nobody has listed
    result |= {path: without(path, wanted.get(path, USES)) for path in sorted(bindings)}
    result["all"] = without_all()
json.dump(result, sys.stdout)
