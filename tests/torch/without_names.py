"""Uses tenure in a torch that lacks a private name; run by test_private_names.py.

Prints as JSON, by purpose, the names that tenure needs for it, all their purposes, and what each
use raised without them: the name in a MissingTorchNameError, the text of any other error, or None.
A name is taken away where tenure has bound it, which has the effect of its absence at import. What
is made of names at import is tried by an import without any of them.
"""

import functools
import importlib
import json
import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from torch import nn

import tenure._torch

ROOMS = (
    "scopes", "adaptive", "adaptive._predict._measured", "profiler", "paging",
    "testing._interface._accelerator", "testing._interface._backward",
)  # fmt: skip
SIMULATION = "the simulated accelerator"
bindings, asked_for = {}, {}
gone = set()
plain_optional = tenure._torch.optional


def record(bind):
    def recording(path, purpose):
        made = bind(path, purpose)
        bindings.setdefault(path, []).append(
            (made, tenure._torch._stand_in(path, purpose), purpose)
        )
        return made

    return recording


def optional(path):
    found = None if path in gone else plain_optional(path)
    asked_for.setdefault(path, []).append(found)
    return found


def load_rooms():
    for room in ROOMS:
        importlib.import_module(f"tenure.{room}")


def scope():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", tenure.TenureWarning)
        with tenure.scopes.DisposeScope():
            made = torch.ones(2) + 1
    if told:
        # a scope that can't dispose says so, and leaves its tensors alone
        assert made.sum() == 4
        text = str(told[0].message)
        raise tenure.MissingTorchNameError(text, text.split()[4].rstrip(","))
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


def simulated():
    def run():
        with tenure.testing.simulated_accelerator() as sim:
            assert float(torch.ones(2, device=sim.device).sum()) == 2

    # the device is put into torch for good
    reader, writer = os.pipe()
    if not os.fork():
        os.write(writer, json.dumps(answer_of(run)).encode())
        os._exit(0)
    os.close(writer)
    os.wait()
    with os.fdopen(reader) as pipe:
        error = json.load(pipe)
    if error is not None:
        raise tenure.MissingTorchNameError("", error)


USES = {
    use.__name__: use
    for use in (
        scope, backward_in_a_scope, container, retry, budget, sparse_in_a_budget, step, lines,
        holders, saved, paged, prediction, simulated,
    )
}  # fmt: skip


def answer_of(use):
    """What a use raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            use()
        except tenure.MissingTorchNameError as error:
            return error.name
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return None


def tried(purposes=(SIMULATION,)):
    """What each use raises; of names that the simulator does not need, it is not tried."""
    needs_it = any(SIMULATION in purpose for purpose in purposes)
    return {name: answer_of(use) for name, use in USES.items() if needs_it or name != "simulated"}


def without(names, made, purposes=()):
    """What uses raise while tenure lacks names of torch.

    Args:
        names: the names.
        made: pairs of the object that tenure has for one, and of its replacement.
        purposes: what tenure says it needs them for.
    """
    modules = [module for name, module in sys.modules.items() if name.startswith("tenure.")]
    needed = tenure._torch.python_backend._names
    places = [
        (values, key, value, other)
        for values, items in (
            *((vars(m), vars(m).items()) for m in modules),
            (needed, enumerate(needed)),
        )
        for key, value in items
        for found, other in made
        if value is found
    ]
    for values, key, _, other in places:
        values[key] = other
    for module in modules:
        for value in vars(module).values():
            if type(value) is functools._lru_cache_wrapper and "tenure._torch." in value.__module__:
                value.cache_clear()
    gone.update(names)
    try:
        return [*names], [*purposes], tried(purposes)
    finally:
        gone.clear()
        for values, key, value, _ in places:
            values[key] = value


def without_all():
    """The rooms, imported anew where torch has no private name at all."""
    for name in [name for name in sys.modules if name.startswith("tenure")]:
        del sys.modules[name]
    names = importlib.import_module("tenure._torch")
    names.optional = lambda path: None
    globals()["tenure"] = importlib.import_module("tenure")
    load_rooms()
    return [], [], tried()


logging.disable()
for bind in ("bound", "getter"):
    setattr(tenure._torch, bind, record(getattr(tenure._torch, bind)))
tenure._torch.optional = optional
load_rooms()
result = {"none": ([], [], tried())}
for purpose in sorted({purpose for made in bindings.values() for _, _, purpose in made}):
    names = [path for path, made in bindings.items() if purpose in {each for _, _, each in made}]
    lost = [(found, other) for name in names for found, other, _ in bindings[name]]
    result[purpose] = without(names, lost, {each for name in names for *_, each in bindings[name]})
# those that tenure can do without
names = [path for path in asked_for.keys() - bindings.keys() if "._" in path]
lost = [(each, None) for name in names for each in asked_for[name] if each is not None]
result["optional"] = without(names, lost)
result["all"] = without_all()
json.dump(result, sys.stdout)
