"""Every way to hold a tensor, and the name that each gets.

By the private names below `holders()`, which tell kinds apart and take many objects at once.
"""

import asyncio
import collections
import contextlib
import contextvars
import ctypes
import dataclasses
import functools
import gc
import os
import re
import sys
import threading
import types
import weakref
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch

from tenure._heap import Holder, find_holders
from tenure._heap._index import Index
from tenure.profiler import holders
from tests.packed_graph import packed_graph

CACHE = []
HERE = __name__


class Box:
    """Anything with attributes."""


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(2, 2)])})
        self.register_buffer("mean", torch.zeros(2))
        self.cache = {"k": torch.zeros(2)}

    def forward(self, x):
        return x


class Attentive:
    """Looks who holds a tensor from inside a method."""

    def __init__(self):
        self.history = [torch.ones(3)]

    def look(self):
        return held(weakref.ref(self.history[0]))


@pytest.fixture(autouse=True)
def _empty_cache():
    yield
    CACHE.clear()


def held(ref):
    """Kind and chain of what holds a tensor; no variable here holds it as well."""
    return [(holder.kind, holder.chain) for holder in find_holders([ref()])[0]]


def here(place):
    """How a chain spells a place that begins with a variable of the test that asks."""
    return f"{sys._getframe(1).f_code.co_qualname}.<locals>.{place}"


def running(ref):
    return [holder.running for holder in find_holders([ref()])[0]]


# variables


def test_plain_local_variable_is_running():
    t = torch.ones(3)
    chain = "test_plain_local_variable_is_running.<locals>.t"
    assert find_holders([t])[0] == [Holder("frame-local", chain, running=True)]


def test_variable_of_every_frame_is_named_and_recursion_repeats_it_once():
    def descend(t, depth):
        return find_holders([t])[0] if depth == 0 else descend(t, depth - 1)

    found = descend(torch.ones(3), 5)
    prefix = "test_variable_of_every_frame_is_named_and_recursion_repeats_it_once.<locals>"
    assert [h.chain for h in found] == [f"{prefix}.descend.<locals>.t"]


def test_answer_has_one_list_for_each_tensor_given_even_twice():
    a, b = torch.ones(3), torch.ones(3)
    assert [len(found) for found in find_holders([a, b, a])] == [1, 1, 1]
    assert find_holders([]) == []


def test_module_global():
    CACHE.append(torch.ones(3))
    assert held(weakref.ref(CACHE[0])) == [("global", f"{HERE}.CACHE[0]")]
    assert running(weakref.ref(CACHE[0])) == [False]


def test_attribute_of_an_item_of_a_global():
    CACHE.append(Box())
    CACHE[0].x = torch.ones(3)
    assert held(weakref.ref(CACHE[0].x)) == [("global", f"{HERE}.CACHE[0].x")]


def test_globals_that_belong_to_no_module():
    space = {"__name__": "script", "torch": torch}
    exec("t = torch.ones(3)", space)
    assert held(weakref.ref(space["t"])) == [("global", "script.t")]


def test_variable_of_a_class_body():
    found = []

    class Body:
        t = torch.ones(3)
        found.extend(find_holders([t])[0])

    assert [h.chain for h in found] == ["test_variable_of_a_class_body.<locals>.Body.t"]


def test_local_of_another_thread():
    ready, done = threading.Event(), threading.Event()
    refs = []

    def work():
        t = torch.ones(3)
        refs.append(weakref.ref(t))
        ready.set()
        done.wait()

    thread = threading.Thread(target=work, name="worker-7")
    thread.start()
    ready.wait()
    found, is_running = held(refs[0]), running(refs[0])
    done.set()
    thread.join()
    name = "test_local_of_another_thread.<locals>.work.<locals>.t"
    assert found == [("thread", f"thread worker-7: {name}")]
    assert is_running == [False]


def test_threading_local_shows_the_attribute():
    local = threading.local()
    local.t = torch.ones(3)
    assert held(weakref.ref(local.t)) == [("thread", here("local['t']"))]


def test_self_is_spelled_as_its_class():
    assert Attentive().look() == [("attribute", "Attentive.history[0]")]


def test_locals_dictionary_of_the_user_survives_the_search():
    t = torch.ones(3)
    mine = locals()
    held(weakref.ref(t))
    assert mine["t"] is t


# containers


def test_list_in_a_local():
    history = [None, None, None, torch.ones(3)]
    assert held(weakref.ref(history[3])) == [("container", here("history[3]"))]
    assert running(weakref.ref(history[3])) == [False]


def test_nested_containers():
    state = {"k": (None, collections.deque([{("a", 1): torch.ones(3)}]))}
    ref = weakref.ref(state["k"][1][0]["a", 1])
    assert held(ref) == [("container", here("state['k'][1][0][('a', 1)]"))]


def test_set_of_tuples():
    pool = {(torch.ones(3), 1)}
    ref = weakref.ref(next(iter(pool))[0])
    assert held(ref) == [("container", here("pool (a member)[0]"))]


def test_key_of_a_dictionary():
    table = {torch.ones(3): 1}
    assert held(weakref.ref(next(iter(table)))) == [("container", here("table (a key)"))]


def test_value_under_an_odd_key_shows_its_type():
    table = {Box(): torch.ones(3), "x" * 100: torch.zeros(3)}
    first, second = map(weakref.ref, table.values())
    name = "test_value_under_an_odd_key_shows_its_type.<locals>.table"
    assert held(first) == [("container", f"{name}[<Box>]")]
    assert held(second) == [("container", f"{name}['{'x' * 39}…]")]


@pytest.mark.parametrize("kind", [collections.OrderedDict, collections.defaultdict, dict])
def test_subclasses_of_dict(kind):
    table = kind()
    table["k"] = torch.ones(3)
    assert held(weakref.ref(table["k"])) == [("container", here("table['k']"))]


def test_two_places_are_two_holders_the_shorter_first():
    deep = {"a": {"b": [torch.ones(3)]}}
    flat = [deep["a"]["b"][0]]
    assert held(weakref.ref(flat[0])) == [
        ("container", here("flat[0]")),
        ("container", here("deep['a']['b'][0]")),
    ]


def test_a_variable_is_before_what_a_view_holds_however_they_were_made():
    t = torch.ones(3)
    views = [t.view(3)]
    plain = [t]
    name = "test_a_variable_is_before_what_a_view_holds_however_they_were_made.<locals>"
    assert [holder.chain for holder in find_holders([t])[0]] == [
        f"{name}.t",
        f"{name}.plain[0]",
        f"a view in {name}.views[0]",
    ]
    del views, plain


class Pair(NamedTuple):
    first: torch.Tensor
    second: tuple[torch.Tensor, ...]


def test_tuple_in_a_variable_counts_as_that_variable():
    batch = (torch.ones(3), Pair(torch.ones(3), (torch.ones(3),)), torch.ones(3, 2).max(0))
    refs = [weakref.ref(t) for t in (batch[0], batch[1].first, *batch[1].second, batch[2].values)]
    chains = [here("batch[0]"), here("batch[1][0]"), here("batch[1][1][0]"), here("batch[2][0]")]
    for ref, chain in zip(refs, chains, strict=True):
        assert find_holders([ref()])[0] == [Holder("container", chain, running=True)]


def test_view_and_graph_beside_a_tuple_in_a_variable_count_as_that_variable():
    hidden = torch.ones(3, requires_grad=True) * 2
    out = (hidden.sin().sum(), hidden, torch.ones(6).view(2, 3))
    del hidden
    assert running(weakref.ref(out[1])) == [True, True]
    assert running(weakref.ref(out[2]._base)) == [True]


def test_arguments_of_a_running_function_are_its_variables():
    def look(*args):
        return running(weakref.ref(args[0]))

    assert look(torch.ones(3)) == [True]


def test_named_result_of_torch_is_a_tuple():
    best = torch.ones(3, 2).max(0)
    pools = [torch.ones(3, 2).max(0)]
    assert find_holders([best.values, pools[0].indices]) == [
        [Holder("container", here("best[0]"), running=True)],
        [Holder("container", here("pools[0][1]"), running=False)],
    ]


@pytest.mark.parametrize("kind", [list, set, collections.deque])
def test_tuple_in_what_may_be_older_is_not_running(kind):
    pool = kind([(torch.ones(3),)])
    assert running(weakref.ref(next(iter(pool))[0])) == [False]


def test_what_may_be_older_in_a_tuple_is_not_running():
    state = ([torch.ones(3)], {"k": torch.ones(3)})
    assert running(weakref.ref(state[0][0])) == running(weakref.ref(state[1]["k"])) == [False]


def test_tuple_in_a_variable_and_in_a_global_is_not_running():
    batch = ((torch.ones(3),),)
    CACHE.append(batch)
    assert find_holders([batch[0][0]])[0] == [
        Holder("global", f"{HERE}.CACHE[0][0][0]", running=False)
    ]


def test_one_list_that_has_it_twice_shows_both_places():
    t = torch.ones(3)
    pair = [t, t]
    ref = weakref.ref(t)
    del t
    assert held(ref) == [("container", here("pair[0]")), ("container", here("pair[1]"))]
    assert len(pair) == 2


def test_list_that_contains_itself():
    ring = [torch.ones(3)]
    ring.append(ring)
    assert held(weakref.ref(ring[0])) == [("container", here("ring[0]"))]


def test_iterator_of_a_loop():
    refs = []
    for t in [torch.ones(3)]:
        refs.append(weakref.ref(t))
        del t
        found = held(refs[0])
    assert found == [("unknown", "tuple_iterator[0], which nothing with a name was found to hold")]


def test_a_name_too_many_steps_away_is_not_denied():
    held_deep = [torch.ones(3)]
    ref = weakref.ref(held_deep[0])
    for _ in range(50):
        held_deep = [held_deep]
    assert held(ref) == [("unknown", "list[0], which nothing with a name was found to hold")]


# objects


def test_instance_attribute():
    box = Box()
    box.cache = {"k": torch.ones(3)}
    assert held(weakref.ref(box.cache["k"])) == [("attribute", here("box.cache['k']"))]


def test_instance_attribute_before_and_after_its_dictionary_exists():
    box = Box()
    box.t = torch.ones(3)
    assert held(weakref.ref(box.t)) == [("attribute", here("box.t"))]
    assert vars(box)
    assert held(weakref.ref(box.t)) == [("attribute", here("box.t"))]


def test_slots():
    @dataclasses.dataclass(slots=True)
    class Pair:
        first: object
        second: object

    pair = Pair(None, torch.ones(3))
    assert held(weakref.ref(pair.second)) == [("attribute", here("pair.second"))]


class Settings(types.SimpleNamespace):
    pass


@pytest.mark.parametrize("kind", [types.SimpleNamespace, Settings])
def test_a_namespace(kind):
    space = kind(t=torch.ones(3))
    assert held(weakref.ref(space.t)) == [("attribute", here("space.t"))]


def test_class_attribute():
    class Registry:
        cache = {"k": torch.ones(3)}  # noqa: RUF012 -- the point of the test

    assert held(weakref.ref(Registry.cache["k"])) == [("attribute", here("Registry.cache['k']"))]


def test_module_shows_dotted_names_from_the_outermost_module():
    model = Model()
    where = ", held by test_module_shows_dotted_names_from_the_outermost_module.<locals>.model"
    assert held(weakref.ref(model.encoder["layers"][0].weight)) == [
        ("attribute", f"Model.encoder.layers[0].weight{where}")
    ]
    assert held(weakref.ref(model.mean)) == [("attribute", f"Model.mean{where}")]
    assert held(weakref.ref(model.cache["k"])) == [("attribute", f"Model.cache['k']{where}")]


def test_optimizer_state_and_gradient():
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = torch.optim.Adam([weight])
    optimizer.step()
    assert held(weakref.ref(optimizer.state[weight]["exp_avg"])) == [
        ("attribute", here("optimizer.state[<Parameter>]['exp_avg']"))
    ]
    assert held(weakref.ref(weight.grad)) == [("attribute", here("weight.grad"))]
    ref = weakref.ref(weight)
    del weight
    assert held(ref) == [
        ("attribute", here("optimizer.state (a key)")),
        ("attribute", here("optimizer.param_groups[0]['params'][0]")),
    ]


# callables


def test_closure_names_the_function_and_the_variable():
    def make():
        t = torch.ones(3)

        def inner():
            return t

        return inner

    CACHE.append(make())
    name = "test_closure_names_the_function_and_the_variable.<locals>.make.<locals>.inner"
    ref = weakref.ref(CACHE[0]())
    assert held(ref) == [("closure", f"closure of {name}: t, held by {HERE}.CACHE[0]")]
    assert running(ref) == [False]


def test_captured_variable_of_a_running_function_is_still_its_variable():
    t = torch.ones(3)

    def inner():
        return t

    assert running(weakref.ref(t)) == [True, True]
    CACHE.append(inner)


def test_closure_that_escaped_to_a_global_is_not_running():
    t = torch.ones(3)
    CACHE.append(lambda: t)
    assert running(weakref.ref(t)) == [True, False]


def test_closure_in_a_local_is_not_running_when_its_variable_belongs_to_a_finished_function():
    def make():
        t = torch.ones(3)
        return lambda: t

    function = make()
    assert running(weakref.ref(function())) == [False]


def test_defaults():
    def function(a, b=torch.ones(3), *, c=torch.zeros(3)):  # noqa: B008 -- the point of the test
        return a, b, c

    first, second = function.__defaults__[0], function.__kwdefaults__["c"]
    refs = weakref.ref(first), weakref.ref(second)
    del first, second
    name = "default of test_defaults.<locals>.function"
    assert held(refs[0]) == [("default", f"{name}: b")]
    assert held(refs[1]) == [("default", f"{name}: c")]


def test_partial():
    call = functools.partial(max, torch.ones(3), key=torch.zeros(3))
    where = "held by test_partial.<locals>.call"
    assert held(weakref.ref(call.args[0])) == [("partial", f"partial of max: args[0], {where}")]
    assert held(weakref.ref(call.keywords["key"])) == [
        ("partial", f"partial of max: keywords['key'], {where}")
    ]


def test_bound_method():
    callbacks = [Model().forward]
    ref = weakref.ref(callbacks[0].__self__.mean)
    where = "held by the bound method test_bound_method.<locals>.callbacks[0]"
    assert held(ref) == [("method", f"Model.mean, {where}")]


def test_bound_method_of_the_tensor_itself():
    method = torch.ones(3).sum
    where = "test_bound_method_of_the_tensor_itself.<locals>.method"
    assert held(weakref.ref(method.__self__)) == [
        ("method", f"Tensor, held by the bound method {where}")
    ]


def test_lru_cache():
    @functools.lru_cache
    def cached(n):
        return torch.ones(n)

    name = "lru_cache of test_lru_cache.<locals>.cached"
    assert held(weakref.ref(cached(3))) == [("cache", name)]


def test_hook_of_another_tensor():
    big, leaf = torch.ones(3), torch.ones(3, requires_grad=True)
    ref = weakref.ref(big)
    leaf.register_hook(lambda gradient, big=big: gradient * big)
    del big
    (found,) = held(ref)
    assert found[0] == "default"
    assert ".leaf._backward_hooks[" in found[1]


# code that stands still


def test_suspended_generator():
    def batches():
        t = torch.ones(3)
        yield weakref.ref(t)

    iterator = batches()
    name = "test_suspended_generator.<locals>"
    assert held(next(iterator)) == [
        ("generator", f"generator {name}.batches: local t, held by {name}.iterator")
    ]


def test_suspended_coroutine_and_async_generator():
    @types.coroutine
    def pause():
        yield

    async def task(refs):
        t = torch.ones(3)
        refs.append(weakref.ref(t))
        await pause()

    async def stream(refs):
        t = torch.ones(3)
        refs.append(weakref.ref(t))
        yield
        del t

    refs = []
    coroutine, generator = task(refs), stream(refs)
    coroutine.send(None)
    with contextlib.suppress(StopIteration):
        generator.asend(None).send(None)
    name = "test_suspended_coroutine_and_async_generator.<locals>"
    assert held(refs[0]) == [
        ("generator", f"coroutine {name}.task: local t, held by {name}.coroutine")
    ]
    assert held(refs[1]) == [
        ("generator", f"async generator {name}.stream: local t, held by {name}.generator")
    ]
    coroutine.close()
    with contextlib.suppress(StopIteration):
        generator.aclose().send(None)


def test_running_generator_is_a_running_frame():
    def batches():
        t = torch.ones(3)
        yield find_holders([t])[0]

    (found,) = batches()
    assert found == [Holder("frame-local", here("batches.<locals>.t"), running=True)]


def boom(refs):
    q = torch.ones(3)
    refs.append(weakref.ref(q))
    raise ValueError


def test_traceback_of_a_stored_exception():
    refs = []
    try:
        boom(refs)
    except ValueError as error:
        stored = error
    name = "test_traceback_of_a_stored_exception.<locals>.stored"
    expected = ("traceback", f"traceback of ValueError in boom(): local q, held by {name}")
    assert held(refs[0]) == [expected]
    assert stored.__traceback__.tb_next.tb_frame.f_locals["q"] is refs[0]()
    assert held(refs[0]) == [expected]


def test_exception_in_flight():
    refs = []
    try:
        boom(refs)
    except ValueError:
        found = held(refs[0])
    assert found == [("traceback", "traceback of ValueError in boom(): local q")]
    assert refs[0]() is None


def test_cause_of_an_exception():
    refs, errors = [], []
    try:
        try:
            boom(refs)
        except ValueError as error:
            raise KeyError from error
    except KeyError as error:
        errors.append(error)
    (found,) = held(refs[0])
    assert found[0] == "traceback"
    assert found[1].startswith("traceback of ValueError in boom(): local q, held by ")
    assert found[1].endswith(here("errors[0] (inside a KeyError)"))


@pytest.mark.usefixtures("whole_heap")
def test_last_value_of_an_interactive_session(monkeypatch):
    refs = []
    try:
        boom(refs)
    except ValueError as error:
        monkeypatch.setattr(sys, "last_value", error, raising=False)
    name = "traceback of ValueError in boom(): local q, held by sys.last_value"
    assert held(refs[0]) == [("traceback", name)]


# context variables

REQUEST = contextvars.ContextVar("request", default=(torch.zeros(2),))


@pytest.mark.parametrize("n_others", [0, 1, 40])
def test_value_of_a_context_variable(n_others):
    def run():
        for index in range(n_others):
            contextvars.ContextVar(f"other {index}").set(index)
        t = torch.ones(3)
        ref = weakref.ref(t)
        REQUEST.set({"cache": t})
        del t
        return held(ref)

    ((kind, chain),) = contextvars.copy_context().run(run)
    assert kind == "context"
    assert chain.startswith("a context variable (inside a Context) (inside a hamt)")
    assert chain.endswith("['cache']")


def test_value_of_a_context_that_a_task_has():
    async def serve(refs):
        REQUEST.set(torch.ones(3))
        refs.append(weakref.ref(REQUEST.get()))
        await asyncio.sleep(0)

    async def look():
        refs, task = [], None
        task = asyncio.create_task(serve(refs))
        await asyncio.sleep(0)
        found = held(refs[0])
        await task
        return found

    ((kind, chain),) = asyncio.run(look())
    assert (kind, chain.split(" (")[0]) == ("context", "a context variable")


@pytest.mark.usefixtures("whole_heap")
def test_default_of_a_context_variable():
    ref = weakref.ref(contextvars.Context().run(REQUEST.get)[0])
    assert held(ref) == [("global", f"{HERE}.REQUEST (inside a ContextVar)[0]")]


# asyncio


def test_task_and_future_of_asyncio():
    async def serve(refs):
        t = torch.ones(3)
        refs.append(weakref.ref(t))
        await asyncio.sleep(100)

    async def look():
        refs, task = [], None
        task = asyncio.create_task(serve(refs), name="server")
        future = asyncio.get_running_loop().create_future()
        future.set_result([torch.ones(3)])
        await asyncio.sleep(0)
        found = held(refs[0]) + held(weakref.ref(future.result()[0]))
        task.cancel()
        return found

    name = "test_task_and_future_of_asyncio.<locals>"
    assert asyncio.run(look()) == [
        (
            "generator",
            f"coroutine {name}.serve: local t, held by {name}.look.<locals>.task (inside a Task)",
        ),
        ("container", f"{name}.look.<locals>.future (inside a Future)[0]"),
    ]


def test_closure_that_only_c_code_has_is_named_by_itself():
    def make():
        t = torch.ones(3)
        return lambda: t

    function = make()
    ref = weakref.ref(function())
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(function))
    inner = weakref.ref(function)
    del function
    ((kind, chain),) = held(ref)
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(inner()))
    name = "test_closure_that_only_c_code_has_is_named_by_itself.<locals>.make.<locals>.<lambda>"
    assert chain == f"closure of {name}: t, which nothing with a name was found to hold"
    assert kind == "closure"


# what only C++ knows


def test_view_pins_its_base():
    base = torch.ones(1000)
    ref, small = weakref.ref(base), base[:3]
    del base
    assert held(ref) == [("view", "a view in test_view_pins_its_base.<locals>.small")]
    assert running(ref) == [False]
    assert small.numel() == 3


def test_view_of_everything_in_a_local_pins_nothing_more():
    x = torch.ones(6)
    ref, x = weakref.ref(x), x.view(2, 3)
    assert running(ref) == [True]
    CACHE.append(x)
    del x
    assert held(ref) == [("view", f"a view in {HERE}.CACHE[0]")]


@pytest.mark.usefixtures("whole_heap")
def test_numpy_array_shares_the_memory():
    t = torch.ones(3)
    CACHE.append(t.numpy()[1:])
    assert held(weakref.ref(t)) == [
        ("frame-local", "test_numpy_array_shares_the_memory.<locals>.t"),
        ("numpy", f"numpy array {HERE}.CACHE[0]"),
    ]
    assert running(weakref.ref(t)) == [True, False]


@pytest.mark.usefixtures("whole_heap")
@pytest.mark.parametrize(
    "make",
    [
        lambda t: t.view(1, 3).numpy(),
        lambda t: t[:2].numpy(),
        lambda t: t.detach().numpy()[1:],
        np.asarray,
        lambda t: t.requires_grad_().numpy(force=True),
        lambda t: memoryview(t.numpy()).obj,
    ],
)
def test_every_way_to_an_array_is_found(make):
    t = torch.ones(3)
    CACHE.append(make(t))
    assert held(weakref.ref(t))[1:] == [("numpy", f"numpy array {HERE}.CACHE[0]")]


ARRAYS = {}


@pytest.mark.usefixtures("whole_heap")
@pytest.mark.parametrize("wrap", [lambda a: a, lambda a: (a, 1), lambda a: {"k": (a,)}])
def test_array_in_a_dictionary_that_the_collector_has_let_go(wrap):
    t = torch.ones(3)
    ARRAYS["result"] = wrap(t.numpy())
    gc.collect()
    name = f"numpy array {HERE}.ARRAYS['result']"
    (_, (kind, chain)) = held(weakref.ref(t))
    ARRAYS.clear()
    assert kind == "numpy"
    assert chain.startswith(name)
    assert "nothing with a name" not in chain


def test_array_of_objects():
    rows = np.empty((2, 3), object)
    rows[1, 2] = {"loss": torch.ones(3)}
    ref = weakref.ref(rows[1, 2]["loss"])
    assert held(ref) == [("container", here("rows.flat[5]['loss']"))]


def test_view_of_an_array_of_objects_and_arrays_in_arrays():
    inner, outer = np.empty(4, object), np.empty(2, object)
    inner[1], outer[0] = torch.ones(3), inner[1:]
    ref = weakref.ref(inner[1])
    del inner
    assert held(ref) == [("container", here("outer.flat[0].base.flat[1]"))]
    assert len(outer) == 2


class Rows(np.ndarray):
    """An array with a here("outer.flat[0].base.flat[1]"), which the collector tracks."""


@pytest.mark.parametrize(
    ("wrap", "spelled"),
    [
        (lambda a: a.view(Rows), ".base"),
        (lambda a: (a, 1), "[0]"),
        (lambda a: {"k": (a,)}, "['k'][0]"),
        (lambda a: np.ma.masked_array(a, [True, False]), ".base"),
    ],
)
def test_array_of_objects_in_what_the_collector_shows_and_in_what_it_does_not(
    request, wrap, spelled
):
    if spelled == "[0]":
        request.getfixturevalue("whole_heap")
    array = np.empty(2, object)
    array[0] = torch.ones(3)
    ref = weakref.ref(array[0])
    ARRAYS["result"] = wrap(array)
    del array
    gc.collect()
    found = held(ref)
    ARRAYS.clear()
    assert found == [("global", f"{HERE}.ARRAYS['result']{spelled}.flat[0]")]


def test_array_of_objects_that_contains_itself():
    array = np.empty(2, object)
    array[0], array[1] = array, torch.ones(3)
    assert held(weakref.ref(array[1])) == [("container", here("array.flat[1]"))]
    array[0] = None


def test_column_of_a_data_frame_is_told_by_the_frame():
    frame = pd.DataFrame({"step": [1, 2], ("loss", 0): [torch.ones(3), torch.zeros(3)]})
    found = held(weakref.ref(frame["loss", 0][1]))
    assert len(found) == 1
    kind, chain = found[0]
    assert chain.startswith(here("frame"))
    assert chain.endswith("(inside a NumpyBlock).flat[1]")
    assert kind == "attribute"


@pytest.mark.usefixtures("whole_heap")
def test_array_over_a_loss_does_not_hold_its_graph():
    x = torch.ones(3, requires_grad=True) * 2
    ref, loss = weakref.ref(x), x.sin().sum()
    del x
    CACHE.append(loss.detach().numpy())
    name = "test_array_over_a_loss_does_not_hold_its_graph.<locals>.loss"
    saved, of_loss = find_holders([ref(), loss])
    assert [h.chain for h in saved] == [f"SinBackward0 (saved self) in the graph of {name}"]
    assert [h.chain for h in of_loss] == [name, f"numpy array {HERE}.CACHE[0]"]


def test_numpy_array_in_a_local():
    t = torch.ones(3)
    array = t.numpy()
    assert ("numpy", "numpy array test_numpy_array_in_a_local.<locals>.array") in held(
        weakref.ref(t)
    )
    assert running(weakref.ref(t)) == [True, True]
    assert isinstance(array, np.ndarray)


def test_graph_node_saved_it():
    leaf = torch.ones(3, requires_grad=True)
    x = leaf * 2
    ref, losses = weakref.ref(x), [x.sin().sum()]
    del x
    name = "test_graph_node_saved_it.<locals>.losses[0]"
    chain = f"SinBackward0 (saved self) in the graph of {name}"
    assert held(ref) == [("autograd", chain)]
    losses[0].backward()
    assert ref() is None


@pytest.mark.parametrize("is_given", [False, True])
def test_graph_is_named_by_what_will_outlive_a_variable(is_given):
    x = torch.ones(3, requires_grad=True) * 2
    ref, validation = weakref.ref(x), x.sin().sum()
    losses = {"history": [validation]}
    del x
    name = "test_graph_is_named_by_what_will_outlive_a_variable.<locals>.losses['history'][0]"
    found = find_holders([ref(), validation] if is_given else [ref()])[0]
    chain = f"SinBackward0 (saved self) in the graph of {name}"
    assert found == [Holder("autograd", chain, running=False, graph=name)]
    assert losses


def test_graph_saved_the_output_under_a_second_handle():
    leaf = torch.ones(3, requires_grad=True)
    x = leaf.exp()
    losses = [x.sum()]
    name = "test_graph_saved_the_output_under_a_second_handle.<locals>"
    assert held(weakref.ref(x)) == [
        ("frame-local", f"{name}.x"),
        ("autograd", f"ExpBackward0 (saved result) in the graph of {name}.losses[0]"),
    ]
    assert losses


def test_graph_saved_a_view_that_has_no_other_handle():
    x = torch.ones(2, 3, 4, requires_grad=True) * 2
    ref, losses = weakref.ref(x), [torch.nn.Linear(4, 4)(x).sum()]
    del x
    name = "test_graph_saved_a_view_that_has_no_other_handle.<locals>.losses[0]"
    chain = f"AddmmBackward0 (saved mat1) in the graph of {name}"
    assert held(ref) == [("autograd", chain)]
    assert losses


def test_second_search_finds_what_the_first_one_gave_a_handle():
    leaf = torch.ones(2, 3, 4, requires_grad=True)
    x = (leaf * 2).exp()
    ref, losses = weakref.ref(x), [torch.nn.Linear(4, 4)(x).sum()]
    del x
    first = held(ref)
    assert [kind for kind, _ in first] == ["autograd", "autograd"]
    assert held(ref) == first
    assert losses


def test_own_graph_does_not_hold_its_output():
    x = torch.ones(3, requires_grad=True).exp()
    assert [kind for kind, _ in held(weakref.ref(x))] == ["frame-local"]


def test_context_of_a_custom_function():
    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.stash = {"k": x * 2}
            CACHE.append(weakref.ref(ctx.stash["k"]))
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    losses = [Keep.apply(torch.ones(3, requires_grad=True)).sum()]
    name = "test_context_of_a_custom_function.<locals>"
    ((kind, chain),) = held(CACHE[0])
    assert kind == "autograd"
    assert chain.endswith(f"in the graph of {name}.losses[0]")
    assert ".stash['k']" in chain
    assert losses


def test_search_runs_no_unpack_hook_and_no_checkpoint():
    calls = []
    x, loss = packed_graph(calls)
    held(weakref.ref(x))
    assert calls == ["forward"]
    loss.backward()


# garbage, and what has no name


def test_cycle_that_is_garbage():
    box = Box()
    box.me, box.t = box, torch.ones(3)
    ref = weakref.ref(box.t)
    gc.disable()
    try:
        del box
        assert held(ref) == [("cycle", "Box.t, in a reference cycle")]
    finally:
        gc.enable()
    gc.collect()
    assert ref() is None


def test_tensor_that_refers_to_itself():
    t = torch.ones(3)
    t.friends = [t]
    assert held(weakref.ref(t)) == [
        ("frame-local", here("t")),
        ("cycle", here("t.friends[0], in a reference cycle")),
    ]


def test_tensor_that_refers_to_its_own_view():
    x = torch.ones(6)
    ref, x = weakref.ref(x), x.view(2, 3)
    ref().view = x
    name = "test_tensor_that_refers_to_its_own_view.<locals>.x"
    assert find_holders([ref()])[0] == [Holder("view", f"a view in {name}", running=True)]


def test_reference_from_an_extension_is_unknown():
    t = torch.ones(3)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(t))
    try:
        text = "1 reference without a name: a value on its way, or an extension module"
        assert held(weakref.ref(t))[1] == ("unknown", text)
    finally:
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(t))


def test_value_that_is_being_returned_is_unknown():
    found = []

    def make():
        with contextlib.ExitStack() as stack:
            ref = []
            stack.callback(lambda: found.extend(held(ref[0])))
            kept = [torch.ones(3)]
            ref.append(weakref.ref(kept[0]))
            return kept.pop()

    make()
    assert [kind for kind, _ in found] == ["unknown"]


# the search itself


class Hostile:
    """Raises at whatever one may ask of it."""

    def __init__(self, t):
        object.__setattr__(self, "t", t)

    def __getattribute__(self, name):
        raise AssertionError(name)

    def __eq__(self, other):
        raise AssertionError("__eq__")

    def __hash__(self):
        return 1

    def __repr__(self):
        raise AssertionError("__repr__")

    __class__ = property(lambda self: 1 / 0)


class HostileMeta(type):
    def __hash__(cls):
        raise AssertionError("__hash__")

    def __eq__(cls, other):
        raise AssertionError("__eq__")


def test_hostile_objects_are_named_like_any_other():
    hostile = Hostile(torch.ones(3))
    ref = weakref.ref(object.__getattribute__(hostile, "t"))
    assert held(ref) == [("attribute", here("hostile.t"))]
    table = {hostile: ref()}
    assert ("container", here("table[<Hostile>]")) in held(ref)
    assert len(table) == 1


def test_class_with_a_hostile_metaclass():
    odd = HostileMeta("Odd", (), {})()
    odd.t = torch.ones(3)
    assert held(weakref.ref(odd.t)) == [("attribute", here("odd.t"))]
    CACHE.append({odd: 1})


def test_dead_proxy_in_the_heap():
    box = Box()
    proxies = [weakref.proxy(box), torch.ones(3)]
    del box
    assert held(weakref.ref(proxies[1])) == [("container", here("proxies[1]"))]


def odd_tensors():
    indices = torch.tensor([[0, 1], [1, 0]])
    sparse = torch.sparse_coo_tensor(indices, torch.ones(2), (2, 2), check_invariants=False)
    yield "sparse", sparse
    yield "meta", torch.ones(3, device="meta")
    yield "parameter", torch.nn.Parameter(torch.ones(3))
    yield "uninitialized", torch.nn.UninitializedParameter()
    yield "subclass", torch.ones(3).as_subclass(Tagged)
    with torch._subclasses.FakeTensorMode():
        yield "fake", torch.ones(3)


class Tagged(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} ran on a tensor")


def test_odd_tensors_are_found():
    kept = list(odd_tensors())
    refs = [(label, weakref.ref(t)) for label, t in kept]
    name = "test_odd_tensors_are_found.<locals>.kept"
    for index, (label, ref) in enumerate(refs):
        assert held(ref) == [("container", f"{name}[{index}][1]")], label


def test_no_operation_reaches_a_mode():
    class Refuse(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    leaf = torch.ones(3, requires_grad=True)
    x = (leaf * 2).view(1, 3)
    losses, ref = [x.sin().sum()], weakref.ref(x)
    with Refuse():
        assert len(held(ref)) == 2
    assert losses


def test_frames_of_tenure_that_ask_are_silent_but_what_others_hold_is_not():
    space = {"__name__": "tenure.room", "find_holders": find_holders}
    lines = (
        "def ask(ref):",
        "    t = ref()",
        "    own = [t, {'k': t}]",
        "    return find_holders([t])",
    )
    exec("\n".join(lines), space)
    history = [torch.ones(3)]
    ((found,),) = space["ask"](weakref.ref(history[0]))
    assert found.chain.endswith("<locals>.history[0]")


def test_ignored_containers_are_no_holders():
    own = [torch.ones(3)]
    assert find_holders([own[0]], ignore=(own,)) == [[]]


def test_nothing_is_kept_after_the_search():
    box = Box()
    box.t, box.me = torch.ones(3), box
    ref = weakref.ref(box.t)
    array = box.t.numpy()
    held(ref)
    del box, array
    gc.collect()
    assert ref() is None
    assert gc.isenabled()


@pytest.fixture
def _no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("whole_heap")
@pytest.mark.usefixtures("_no_collector")
def test_search_leaves_no_garbage():
    t = torch.ones(3)
    view, array = t[:1], t.numpy()
    # the first search of a process may import
    held(weakref.ref(t))
    gc.collect()
    held(weakref.ref(t))
    assert gc.collect() == 0
    assert view.data_ptr() == array.ctypes.data


def test_order_is_the_same_every_time():
    t = torch.ones(3)
    places = {"b": [t], "a": [t], "c": (t,), "d": {"t": t}}
    ref = weakref.ref(t)
    first = held(ref)
    assert all(held(ref) == first for _ in range(3))
    assert len(first) == 1 + len(places)


def test_ten_thousand_tensors_in_one_list_take_one_look_at_the_heap(monkeypatch):
    count = 10_000
    history = [torch.empty(0) for _ in range(count)]
    looks = []
    of = Index.of
    monkeypatch.setattr(Index, "of", lambda *args: looks.append(1) or of(*args))
    found = find_holders([*history])
    name = "test_ten_thousand_tensors_in_one_list_take_one_look_at_the_heap.<locals>.history"
    assert [h.chain for (h,) in found] == [f"{name}[{index}]" for index in range(count)]
    # near the variables, then in the heap
    assert len(looks) == 2


def test_long_chain_of_owners_is_cut_and_still_answered():
    chain = [torch.ones(3)]
    ref = weakref.ref(chain[0])
    for _ in range(100):
        chain = [chain]
    ((kind, text),) = held(ref)
    assert kind == "unknown"
    assert text.startswith("list[0]")


def test_a_tuple_that_is_still_being_filled_is_read_as_far_as_it_is():
    found = []

    def items():
        first = torch.ones(3)
        yield first
        yield torch.zeros(3)
        # the tuple has places for more by now, and nothing in them
        found.extend(find_holders([first]))

    assert len((lambda *args: args)(*items())) == 2
    assert [holder.kind for holder in found[0]][:1] == ["generator"] or found[0]


class Link:
    def __init__(self, tensor, rest):
        self.tensor, self.rest = tensor, rest


def test_a_long_list_of_links_is_spelled_from_its_middle_on():
    first, tensors = None, []
    for _ in range(800):
        tensors.append(torch.ones(3))
        first = Link(tensors[-1], first)
    ((last, *_), *_, (newest, *_)) = find_holders(tensors, ignore=[tensors])
    assert newest.chain.endswith("<locals>.first.tensor")
    assert re.fullmatch(r"test_\w+\.<locals>\.first\.rest\.…\.tensor", last.chain)
    assert (last.kind, len(last.chain) < 4000) == ("attribute", True)


class Caller(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, batch):
        return self.call(batch)


def test_a_package_that_is_installed_beside_the_library_of_python_is_no_part_of_it():
    """Without a virtual environment its files are in a folder below."""
    library = os.path.join(os.path.dirname(os.__file__), "")
    order = []
    for file in ("/home/me/mine.py", f"{library}site-packages/mine.py", f"{library}mine.py"):
        names = {"__name__": "mine", "holders": holders}
        exec(compile("def look(x): names = list(holders(x)); return names", file, "exec"), names)
        found = torch.nn.Sequential(Caller(names["look"]))(torch.ones(3))
        order.append(
            found.index("look.<locals>.x") < found.index("Sequential.forward.<locals>.input")
        )
    assert order == [True, True, False]
