"""Ways in which real programs keep a tensor, each planted alone: `holders` names every one."""

import collections
import concurrent.futures
import dataclasses
import functools
import gc
import logging
import queue
import signal
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from tenure.profiler import holders

STORE = {}
HERE = __name__


class Box:
    """Anything with attributes."""


class Keeping(logging.Handler):
    """Keeps the records that it gets."""

    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)


class Lazily:
    """Computes once."""

    @functools.cached_property
    def embedding(self):
        return torch.ones(3)


@dataclasses.dataclass
class Output:
    """What a model returns."""

    logits: object


Point = collections.namedtuple("Point", "loss")  # noqa: PYI024 -- the point of the test


@pytest.fixture(autouse=True)
def _empty_store():
    yield
    STORE.clear()


def in_a_forward_hook(t):
    STORE["model"] = nn.Linear(1, 1)
    handle = STORE["model"].register_forward_hook(lambda *_: t)
    where = f"Linear._forward_hooks[{handle.id}]"
    return f"closure of in_a_forward_hook.<locals>.<lambda>: t, held by {where}"


def in_a_hook_of_a_tensor(t):
    STORE["weight"] = torch.ones(1, requires_grad=True)
    STORE["weight"].register_hook(lambda gradient: gradient * t.sum())
    return "closure of in_a_hook_of_a_tensor.<locals>.<lambda>: t, held by"


def in_a_hook_after_a_gradient(t):
    STORE["weight"] = torch.ones(1, requires_grad=True)
    STORE["weight"].register_post_accumulate_grad_hook(lambda _: t)
    return "closure of in_a_hook_after_a_gradient.<locals>.<lambda>: t, held by"


def in_the_arguments_of_a_record(t):
    handler, logger = Keeping(), logging.Logger("planted")
    logger.addHandler(handler)
    logger.warning("loss %s", t)
    STORE["handler"] = handler
    return f"{HERE}.STORE['handler'].records[0].args[0]"


def in_the_results_of_a_notebook(t):
    space = {"__name__": "notebook", "__builtins__": {}, "Out": {3: t}}
    STORE["shell"] = space
    return "notebook.Out[3]"


def in_the_callback_of_a_weak_reference(t):
    STORE["box"] = Box()
    STORE["ref"] = weakref.ref(STORE["box"], lambda _: t)
    name = "in_the_callback_of_a_weak_reference.<locals>.<lambda>"
    return f"closure of {name}: t, held by {HERE}.STORE['ref']"


def in_a_finalizer(t):
    STORE["box"] = Box()
    weakref.finalize(STORE["box"], print, t)
    return "finalize._registry[<finalize>].args[0]"


def in_a_data_loader(t):
    STORE["loader"] = torch.utils.data.DataLoader([1], collate_fn=lambda _: t)
    return "closure of in_a_data_loader.<locals>.<lambda>: t, held by"


def in_a_user_dict(t):
    STORE["state"] = collections.UserDict(k=t)
    return f"{HERE}.STORE['state'].data['k']"


def in_a_dataclass(t):
    STORE["output"] = Output(t)
    return f"{HERE}.STORE['output'].logits"


def in_a_named_tuple(t):
    STORE["point"] = Point(t)
    return f"{HERE}.STORE['point'][0]"


def in_a_single_dispatch(t):
    @functools.singledispatch
    def show(_):
        return None

    show.register(int)(lambda _: t)
    STORE["show"] = show
    return "closure of in_a_single_dispatch.<locals>.<lambda>: t, held by"


def in_a_future(t):
    STORE["future"] = concurrent.futures.Future()
    STORE["future"].set_result(t)
    return f"{HERE}.STORE['future']._result"


def in_a_queue(t):
    STORE["queue"] = queue.Queue()
    STORE["queue"].put(t)
    return f"{HERE}.STORE['queue'].queue[0]"


def in_an_array_of_objects(t):
    STORE["rows"] = np.empty((2, 2), object)
    STORE["rows"][0, 1] = t
    return f"{HERE}.STORE['rows'].flat[1]"


PLANTS = [value for name, value in list(globals().items()) if name.startswith("in_")]
# The chain leads through what was there before this file.
THROUGH_OLD = (in_a_finalizer, in_an_array_of_objects)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_leak_is_named(request, plant):
    if plant in THROUGH_OLD:
        request.getfixturevalue("whole_heap")
    t = torch.ones(3)
    name = plant(t)
    ref = weakref.ref(t)
    del t
    gc.collect()
    found = holders(ref())
    assert any(held.startswith(name) for held in found), found
    assert found.n_unexplained == 0


def test_a_cached_property_is_named():
    STORE["lazy"] = Lazily()
    assert holders(STORE["lazy"].embedding) == [f"{HERE}.STORE['lazy'].embedding"]


def test_the_closure_of_a_handler_of_a_signal_is_named():
    t = torch.ones(3)
    before = signal.signal(signal.SIGUSR1, lambda *_: t)
    ref = weakref.ref(t)
    try:
        name = "test_the_closure_of_a_handler_of_a_signal_is_named.<locals>.<lambda>"
        assert any(chain.startswith(f"closure of {name}: t") for chain in holders(ref()))
    finally:
        signal.signal(signal.SIGUSR1, before)
