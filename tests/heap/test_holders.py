"""Every way to hold a tensor, and the name that each gets.

By the private names below `holders()`, which tell kinds apart and take many objects at once.
"""

import asyncio
import contextlib
import contextvars
import ctypes
import gc
import os
import re
import sys
import textwrap
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
ARRAYS = {}
HERE = __name__


class Box:
    """Anything with attributes."""


class Settings(types.SimpleNamespace):
    pass


class Slotted:
    __slots__ = ("__weakref__", "t")


class Rows(np.ndarray):
    """An array that the collector tracks."""


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(2, 2)])})
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
    ARRAYS.clear()


def held(ref):
    """Kind and chain of what holds a tensor; no variable here holds it as well."""
    return [(holder.kind, holder.chain) for holder in find_holders([ref()])[0]]


def running(ref):
    return [holder.running for holder in find_holders([ref()])[0]]


def here(place):
    """How a chain spells a place that begins with a variable of the test that asks."""
    return f"{sys._getframe(1).f_code.co_qualname}.<locals>.{place}"


def held_in(setup, tensor):
    """The same of a tensor in a function `place`, after some lines in it."""
    imports = "import collections, functools, threading, types"
    lines = textwrap.indent(
        f"{imports}\n{setup}\nref = weakref.ref({tensor})\nreturn held(ref)", "    "
    )
    made = {}
    exec(f"def place():\n{lines}", globals(), made)
    return made["place"]()


# --- one place. In a chain @ is what stands before a variable of the function.

ONES = "torch.ones(3)"
IN_MODEL = ", held by @model"
PLACES = [
    (f"CACHE.append({ONES})", "CACHE[0]", "global", f"{HERE}.CACHE[0]"),
    (f"CACHE.append(Box()); CACHE[0].x = {ONES}", "CACHE[0].x", "global", f"{HERE}.CACHE[0].x"),
    (f"local = threading.local(); local.t = {ONES}", "local.t", "thread", "@local['t']"),
    # containers
    (f"history = [None, None, {ONES}]", "history[2]", "container", "@history[2]"),
    (
        f"state = {{'k': (None, collections.deque([{{('a', 1): {ONES}}}]))}}",
        *("state['k'][1][0]['a', 1]", "container", "@state['k'][1][0][('a', 1)]"),
    ),
    (f"pool = {{({ONES}, 1)}}", "next(iter(pool))[0]", "container", "@pool (a member)[0]"),
    (f"table = {{{ONES}: 1}}", "next(iter(table))", "container", "@table (a key)"),
    (f"table = {{Box(): {ONES}}}", "[*table.values()][0]", "container", "@table[<Box>]"),
    (
        f"table = {{'x' * 100: {ONES}}}",
        *("table['x' * 100]", "container", f"@table['{'x' * 39}…]"),
    ),
    (
        f"table = collections.OrderedDict(k={ONES})",
        *("table['k']", "container", "@table['k']"),
    ),
    (f"ring = [{ONES}]; ring.append(ring)", "ring[0]", "container", "@ring[0]"),
    # objects
    (f"box = Box(); box.t = {{'k': {ONES}}}", "box.t['k']", "attribute", "@box.t['k']"),
    (f"box = Box(); box.t = {ONES}", "box.t", "attribute", "@box.t"),
    (f"box = Box(); box.t = {ONES}; vars(box)", "box.t", "attribute", "@box.t"),
    (f"box = Slotted(); box.t = {ONES}", "box.t", "attribute", "@box.t"),
    (f"space = types.SimpleNamespace(t={ONES})", "space.t", "attribute", "@space.t"),
    (f"space = Settings(t={ONES})", "space.t", "attribute", "@space.t"),
    (f"class Registry:\n    t = [{ONES}]", "Registry.t[0]", "attribute", "@Registry.t[0]"),
    (
        "model = Model()",
        "model.encoder['layers'][0].weight",
        *("attribute", f"Model.encoder.layers[0].weight{IN_MODEL}"),
    ),
    ("model = Model()", "model.cache['k']", "attribute", f"Model.cache['k']{IN_MODEL}"),
    # callables
    (
        f"def f(a, b={ONES}): pass",
        *("f.__defaults__[0]", "default", "default of @f: b"),
    ),
    (
        f"def f(*, c={ONES}): pass",
        *("f.__kwdefaults__['c']", "default", "default of @f: c"),
    ),
    (
        f"call = functools.partial(max, {ONES})",
        *("call.args[0]", "partial", "partial of max: args[0], held by @call"),
    ),
    (
        f"call = functools.partial(max, key={ONES})",
        *("call.keywords['key']", "partial", "partial of max: keywords['key'], held by @call"),
    ),
    (
        "calls = [Model().forward]",
        "calls[0].__self__.cache['k']",
        *("method", "Model.cache['k'], held by the bound method @calls[0]"),
    ),
    (
        f"call = {ONES}.sum",
        *("call.__self__", "method", "Tensor, held by the bound method @call"),
    ),
    (
        "@functools.lru_cache\ndef cached(n):\n    return torch.ones(n)",
        *("cached(3)", "cache", "lru_cache of @cached"),
    ),
    # arrays of objects
    (
        f"rows = np.empty((2, 3), object); rows[1, 2] = {{'loss': {ONES}}}",
        *("rows[1, 2]['loss']", "container", "@rows.flat[5]['loss']"),
    ),
    (
        "inner, outer = np.empty(4, object), np.empty(2, object)\n"
        f"inner[1], outer[0] = {ONES}, inner[1:]; del inner",
        *("outer[0][0]", "container", "@outer.flat[0].base.flat[1]"),
    ),
    # too far away, or nowhere
    (
        f"deep = [{ONES}]; ref = weakref.ref(deep[0])\nfor _ in range(50): deep = [deep]",
        *("ref()", "unknown", "list[0], which nothing with a name was found to hold"),
    ),
]


@pytest.mark.parametrize(
    ("setup", "tensor", "kind", "chain"), PLACES, ids=[setup[:50] for setup, *_ in PLACES]
)
def test_what_holds_a_tensor_has_its_kind_and_its_name(setup, tensor, kind, chain):
    assert held_in(setup, tensor) == [(kind, chain.replace("@", "place.<locals>."))]


# --- variables


def test_globals_that_belong_to_no_module():
    space = {"__name__": "script", "torch": torch}
    exec("t = torch.ones(3)", space)
    assert held(weakref.ref(space["t"])) == [("global", "script.t")]


def test_a_variable_of_every_frame_is_named_and_recursion_repeats_it_once():
    def descend(t, depth):
        return find_holders([t])[0] if depth == 0 else descend(t, depth - 1)

    expected = [Holder("frame-local", here("descend.<locals>.t"), running=True)]
    assert descend(torch.ones(3), 5) == expected


def test_the_answer_has_one_list_for_each_tensor_given_even_twice():
    a, b = torch.ones(3), torch.ones(3)
    assert [len(found) for found in find_holders([a, b, a])] == [1, 1, 1]
    assert find_holders([]) == []


def test_a_local_of_another_thread():
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
    assert found == [("thread", f"thread worker-7: {here('work.<locals>.t')}")]
    assert is_running == [False]


def test_self_is_spelled_as_its_class():
    assert Attentive().look() == [("attribute", "Attentive.history[0]")]


# --- several places, and which of them are the variables of what runs


def test_a_variable_comes_first_and_shorter_names_before_longer_ones():
    t = torch.ones(3)
    views, deep, flat = [t.view(3)], {"a": {"b": [t]}}, [t, t]
    assert [holder.chain for holder in find_holders([t])[0]] == [
        here("t"),
        here("flat[0]"),
        here("flat[1]"),
        f"a view in {here('views[0]')}",
        here("deep['a']['b'][0]"),
    ]
    del views, deep, flat


class Pair(NamedTuple):
    first: torch.Tensor
    second: tuple[torch.Tensor, ...]


def test_a_tuple_in_a_variable_counts_as_that_variable():
    batch = (torch.ones(3), Pair(torch.ones(3), (torch.ones(3),)), torch.ones(3, 2).max(0))
    refs = [weakref.ref(t) for t in (batch[0], batch[1].first, *batch[1].second, batch[2].values)]
    chains = [here("batch[0]"), here("batch[1][0]"), here("batch[1][1][0]"), here("batch[2][0]")]
    for ref, chain in zip(refs, chains, strict=True):
        assert find_holders([ref()])[0] == [Holder("container", chain, running=True)]
    pools = [torch.ones(3, 2).max(0)]
    assert find_holders([pools[0].indices])[0] == [
        Holder("container", here("pools[0][1]"), running=False)
    ]


def test_a_view_and_a_graph_beside_a_tuple_in_a_variable_count_as_that_variable():
    hidden = torch.ones(3, requires_grad=True) * 2
    out = (hidden.sin().sum(), hidden, torch.ones(6).view(2, 3))
    del hidden
    assert running(weakref.ref(out[1])) == [True, True]
    assert running(weakref.ref(out[2]._base)) == [True]


def test_what_may_be_older_is_not_running():
    pool, state = {(torch.ones(3),)}, ([torch.ones(3)], {"k": torch.ones(3)})
    batch = ((torch.ones(3),),)
    CACHE.append(batch)
    kept = (next(iter(pool))[0], state[0][0], state[1]["k"], batch[0][0])
    refs = [*map(weakref.ref, kept)]
    del kept
    assert [running(ref) for ref in refs] == [[False]] * 4


def test_an_optimizer_has_state_and_parameters():
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


# --- closures


def test_a_closure_names_the_function_and_the_variable():
    def make():
        t = torch.ones(3)
        return lambda: t

    CACHE.append(make())
    ref = weakref.ref(CACHE[0]())
    name = here("make.<locals>.<lambda>")
    assert held(ref) == [("closure", f"closure of {name}: t, held by {HERE}.CACHE[0]")]
    assert running(ref) == [False]


def test_a_captured_variable_of_a_running_function_is_still_its_variable():
    t = torch.ones(3)

    def inner():
        return t

    assert running(weakref.ref(t)) == [True, True]
    CACHE.append(inner)
    assert running(weakref.ref(t)) == [True, False]


def test_a_closure_that_only_c_code_has_is_named_by_itself():
    def make():
        t = torch.ones(3)
        return lambda: t

    function = make()
    ref = weakref.ref(function())
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(function))
    inner = weakref.ref(function)
    del function
    found = held(ref)
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(inner()))
    chain = f"closure of {here('make.<locals>.<lambda>')}: t, which nothing with a name was found"
    assert found == [("closure", f"{chain} to hold")]


# --- code that stands still


def test_generators_coroutines_and_tasks():
    @types.coroutine
    def pause():
        yield

    def batches(refs):
        t = torch.ones(3)
        refs.append(weakref.ref(t))
        yield find_holders([t])[0]
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
    iterator, coroutine, generator = batches(refs), task(refs), stream(refs)
    assert next(iterator) == [Holder("frame-local", here("batches.<locals>.t"), running=True)]
    coroutine.send(None)
    with contextlib.suppress(StopIteration):
        generator.asend(None).send(None)
    for ref, what, variable in zip(
        refs,
        ("generator @batches", "coroutine @task", "async generator @stream"),
        ("iterator", "coroutine", "generator"),
        strict=True,
    ):
        chain = f"{what.replace('@', here(''))}: local t, held by {here(variable)}"
        assert held(ref) == [("generator", chain)]
    coroutine.close()
    with contextlib.suppress(StopIteration):
        generator.aclose().send(None)


def boom(refs):
    q = torch.ones(3)
    refs.append(weakref.ref(q))
    raise ValueError


def test_a_traceback_of_an_exception_in_flight_stored_or_a_cause():
    refs, errors = [], []
    try:
        boom(refs)
    except ValueError:
        in_flight = held(refs[0])
    local = "traceback of ValueError in boom(): local q"
    assert in_flight == [("traceback", local)]
    assert refs.pop()() is None
    try:
        boom(refs)
    except ValueError as error:
        stored = error
    assert held(refs[0]) == [("traceback", f"{local}, held by {here('stored')}")]
    assert stored.__traceback__.tb_next.tb_frame.f_locals["q"] is refs[0]()
    try:
        try:
            boom(refs)
        except ValueError as error:
            raise KeyError from error
    except KeyError as error:
        errors.append(error)
    (found,) = held(refs[1])
    assert found[0] == "traceback"
    assert found[1].startswith(f"{local}, held by ")
    assert found[1].endswith(here("errors[0] (inside a KeyError)"))


@pytest.mark.usefixtures("whole_heap")
def test_the_last_value_of_an_interactive_session(monkeypatch):
    refs = []
    try:
        boom(refs)
    except ValueError as error:
        monkeypatch.setattr(sys, "last_value", error, raising=False)
    name = "traceback of ValueError in boom(): local q, held by sys.last_value"
    assert held(refs[0]) == [("traceback", name)]


REQUEST = contextvars.ContextVar("request", default=(torch.zeros(2),))


@pytest.mark.parametrize("n_others", [0, 40])
def test_the_value_of_a_context_variable(n_others):
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


@pytest.mark.usefixtures("whole_heap")
def test_the_default_of_a_context_variable():
    ref = weakref.ref(contextvars.Context().run(REQUEST.get)[0])
    assert held(ref) == [("global", f"{HERE}.REQUEST (inside a ContextVar)[0]")]


def test_a_task_a_future_and_the_context_of_a_task():
    async def serve(refs):
        t = torch.ones(3)
        refs.append(weakref.ref(t))
        REQUEST.set(torch.ones(3))
        refs.append(weakref.ref(REQUEST.get()))
        await asyncio.sleep(100)

    async def look():
        refs, task = [], None
        task = asyncio.create_task(serve(refs), name="server")
        future = asyncio.get_running_loop().create_future()
        future.set_result([torch.ones(3)])
        await asyncio.sleep(0)
        found = held(refs[0]) + held(weakref.ref(future.result()[0])) + held(refs[1])
        task.cancel()
        return found

    name = "test_a_task_a_future_and_the_context_of_a_task.<locals>"
    *found, (kind, chain) = asyncio.run(look())
    task = f"{name}.look.<locals>.task (inside a Task)"
    assert found == [
        ("generator", f"coroutine {name}.serve: local t, held by {task}"),
        ("container", f"{name}.look.<locals>.future (inside a Future)[0]"),
    ]
    assert (kind, chain.split(" (")[0]) == ("context", "a context variable")


# --- what only C++ knows


def test_a_view_pins_its_base_and_one_of_everything_in_a_local_no_more():
    base = torch.ones(1000)
    ref, small = weakref.ref(base), base[:3]
    del base
    assert held(ref) == [("view", f"a view in {here('small')}")]
    assert running(ref) == [False]
    x = torch.ones(6)
    ref, x = weakref.ref(x), x.view(2, 3)
    assert running(ref) == [True]
    CACHE.append(x)
    del x, small
    assert held(ref) == [("view", f"a view in {HERE}.CACHE[0]")]


def test_a_tensor_that_refers_to_its_own_view():
    x = torch.ones(6)
    ref, x = weakref.ref(x), x.view(2, 3)
    ref().view = x
    assert find_holders([ref()])[0] == [Holder("view", f"a view in {here('x')}", running=True)]


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
def test_every_way_to_an_array_that_shares_the_memory_is_found(make):
    t = torch.ones(3)
    CACHE.append(make(t))
    assert held(weakref.ref(t)) == [
        ("frame-local", here("t")),
        ("numpy", f"numpy array {HERE}.CACHE[0]"),
    ]
    array = CACHE.pop()
    assert running(weakref.ref(t)) == [True, True]
    del array


@pytest.mark.usefixtures("whole_heap")
@pytest.mark.parametrize("wrap", [lambda a: a, lambda a: (a, 1), lambda a: {"k": (a,)}])
def test_an_array_in_a_dictionary_that_the_collector_has_let_go(wrap):
    t = torch.ones(3)
    ARRAYS["result"] = wrap(t.numpy())
    gc.collect()
    (_, (kind, chain)) = held(weakref.ref(t))
    assert kind == "numpy"
    assert chain.startswith(f"numpy array {HERE}.ARRAYS['result']")
    assert "nothing with a name" not in chain


@pytest.mark.parametrize(
    ("wrap", "spelled"),
    [
        (lambda a: a.view(Rows), ".base"),
        (lambda a: (a, 1), "[0]"),
        (lambda a: np.ma.masked_array(a, [True, False]), ".base"),
    ],
)
def test_an_array_of_objects_in_what_the_collector_shows_and_in_what_it_does_not(
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
    assert held(ref) == [("global", f"{HERE}.ARRAYS['result']{spelled}.flat[0]")]


def test_a_column_of_a_data_frame_is_told_by_the_frame():
    frame = pd.DataFrame({"step": [1, 2], ("loss", 0): [torch.ones(3), torch.zeros(3)]})
    ((kind, chain),) = held(weakref.ref(frame["loss", 0][1]))
    assert chain.startswith(here("frame"))
    assert chain.endswith("(inside a NumpyBlock).flat[1]")
    assert kind == "attribute"


# --- graphs


@pytest.mark.usefixtures("whole_heap")
def test_a_graph_is_named_by_what_will_outlive_a_variable_and_by_no_array_over_its_loss():
    x = torch.ones(3, requires_grad=True) * 2
    ref, validation = weakref.ref(x), x.sin().sum()
    losses = {"history": [validation]}
    del x
    CACHE.append(validation.detach().numpy())
    name = here("losses['history'][0]")
    chain = f"SinBackward0 (saved self) in the graph of {name}"
    expected = [Holder("autograd", chain, running=False, graph=name)]
    assert find_holders([ref()])[0] == find_holders([ref(), validation])[0] == expected
    losses["history"].pop().backward()
    assert ref() is None


def test_a_graph_saved_the_output_under_a_second_handle_and_its_own_does_not_hold_it():
    x = torch.ones(3, requires_grad=True).exp()
    assert held(weakref.ref(x)) == [("frame-local", here("x"))]
    losses = [x.sum()]
    chain = f"ExpBackward0 (saved result) in the graph of {here('losses[0]')}"
    assert held(weakref.ref(x)) == [("frame-local", here("x")), ("autograd", chain)]
    assert losses


def test_a_second_search_finds_the_view_that_the_first_one_gave_a_handle():
    x = (torch.ones(2, 3, 4, requires_grad=True) * 2).exp()
    ref, losses = weakref.ref(x), [torch.nn.Linear(4, 4)(x).sum()]
    del x
    first = held(ref)
    chain = f"AddmmBackward0 (saved mat1) in the graph of {here('losses[0]')}"
    assert [kind for kind, _ in first] == ["autograd", "autograd"]
    assert ("autograd", chain) in first
    assert held(ref) == first
    assert losses


def test_the_context_of_a_custom_function():
    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.stash = {"k": x * 2}
            CACHE.append(weakref.ref(ctx.stash["k"]))
            return x.clone()

    losses = [Keep.apply(torch.ones(3, requires_grad=True)).sum()]
    ((kind, chain),) = held(CACHE[0])
    assert kind == "autograd"
    assert chain.endswith(f"in the graph of {here('losses[0]')}")
    assert ".stash['k']" in chain
    assert losses


def test_a_search_runs_no_unpack_hook_and_no_checkpoint():
    calls = []
    x, loss = packed_graph(calls)
    held(weakref.ref(x))
    assert calls == ["forward"]
    loss.backward()


# --- garbage, and what has no name


def test_a_cycle_that_is_garbage():
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


def test_a_tensor_that_refers_to_itself():
    t = torch.ones(3)
    t.friends = [t]
    assert held(weakref.ref(t)) == [
        ("frame-local", here("t")),
        ("cycle", here("t.friends[0], in a reference cycle")),
    ]


def test_a_reference_from_an_extension_and_a_value_on_its_way_are_unknown():
    t = torch.ones(3)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(t))
    try:
        text = "1 reference without a name: a value on its way, or an extension module"
        assert held(weakref.ref(t))[1] == ("unknown", text)
    finally:
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(t))
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


# --- the search itself


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
    hostile, odd, dead = Hostile(torch.ones(3)), HostileMeta("Odd", (), {})(), Box()
    ref = weakref.ref(object.__getattribute__(hostile, "t"))
    table = {hostile: ref(), "dead": weakref.proxy(dead)}
    del dead
    odd.t = ref()
    assert set(held(ref)) == {
        ("attribute", here("hostile.t")),
        ("container", here("table[<Hostile>]")),
        ("attribute", here("odd.t")),
    }
    assert len(table) == 2


def odd_tensors():
    indices = torch.tensor([[0, 1], [1, 0]])
    yield torch.sparse_coo_tensor(indices, torch.ones(2), (2, 2), check_invariants=False)
    yield torch.ones(3, device="meta")
    yield torch.nn.Parameter(torch.ones(3))
    yield torch.nn.UninitializedParameter()
    yield torch.ones(3).as_subclass(Tagged)
    with torch._subclasses.FakeTensorMode():
        yield torch.ones(3)


class Tagged(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} ran on a tensor")


class Refuse(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        raise AssertionError(func)


def test_odd_tensors_are_found_and_no_operation_reaches_a_mode():
    kept = list(odd_tensors())
    refs = [*map(weakref.ref, kept)]
    leaf = torch.ones(3, requires_grad=True)
    x = (leaf * 2).view(1, 3)
    losses, ref = [x.sin().sum()], weakref.ref(x)
    with Refuse():
        for index, each in enumerate(refs):
            assert held(each) == [("container", here(f"kept[{index}]"))]
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
    assert find_holders([history[0]], ignore=(history,)) == [[]]


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


@pytest.mark.usefixtures("whole_heap", "_no_collector")
def test_a_search_leaves_no_garbage():
    t = torch.ones(3)
    view, array = t[:1], t.numpy()
    # the first search of a process may import
    held(weakref.ref(t))
    gc.collect()
    held(weakref.ref(t))
    assert gc.collect() == 0
    assert view.data_ptr() == array.ctypes.data


def test_ten_thousand_tensors_in_one_list_take_one_look_at_the_heap(monkeypatch):
    history = [torch.empty(0) for _ in range(10_000)]
    looks = []
    of = Index.of
    monkeypatch.setattr(Index, "of", lambda *args: looks.append(1) or of(*args))
    found = find_holders([*history])
    name = here("history")
    assert [h.chain for (h,) in found] == [f"{name}[{i}]" for i in range(10_000)]
    # near the variables, then in the heap
    assert len(looks) == 2


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
