"""Every way to hold a tensor, and the name that each gets.

By the private names below `holders()`, which tell kinds apart and take many objects at once.
"""

import asyncio
import contextvars
import ctypes
import gc
import os
import pickle
import sys
import textwrap
import threading
import types
import weakref
from typing import NamedTuple

import numpy as np
import pytest
import torch

from tenure import NewDisposeScope
from tenure._heap import Holder, find_holders
from tenure._heap._index import Index
from tenure.profiler import HolderList, ProfilerUsageError, holders

CACHE = []
ARRAYS = {}
HERE = __name__


class Box:
    """Anything with attributes."""


class Slotted:
    __slots__ = ("__weakref__", "t")


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(2, 2)])})
        self.cache = {"k": torch.zeros(2)}

    def forward(self, x):
        return x


@pytest.fixture(autouse=True)
def _empty_cache():
    yield
    CACHE.clear()
    ARRAYS.clear()


def held(ref):
    """Kind and chain of what holds a tensor; no variable here holds it as well."""
    return [(holder.kind, holder.chain) for holder in find_holders([ref()])[0]]


def balance(ref):
    """References that were found and not, and the number that there are beside one temporary's."""
    found = holders(ref())
    alone = sys.getrefcount(torch.ones(1))
    return found.n_references, found.n_unexplained, sys.getrefcount(ref()) - alone


def running(ref):
    return [holder.running for holder in find_holders([ref()])[0]]


def here(place):
    """How a chain spells a place that begins with a variable of the test that asks."""
    return f"{sys._getframe(1).f_code.co_qualname}.<locals>.{place}"


def held_in(setup, tensor):
    """The same of a tensor in a function `place`, after some lines in it."""
    imports = "import collections, contextlib, functools, threading"
    lines = textwrap.indent(
        f"{imports}\n{setup}\nref = weakref.ref({tensor})\nreturn held(ref), balance(ref)", "    "
    )
    made = {}
    exec(f"def place():\n{lines}", globals(), made)
    return made["place"]()


@types.coroutine
def pause():
    yield


def boom(refs):
    q = torch.ones(3)
    refs.append(weakref.ref(q))
    raise ValueError


def closing(t):
    return lambda *_: t


def generate(refs):
    t = torch.ones(3)
    refs.append(weakref.ref(t))
    yield


# --- one place: kind, tensor and name, and the lines that put it there. In a name @ is what stands
# before a variable of their function.

PLACES = """
global | CACHE[0] | HERE.CACHE[0]
CACHE.append(ONES)

thread | local.t | @local['t']
local = threading.local(); local.t = ONES

container | history[2] | @history[2]
history = [None, None, ONES]

container | state['k'][1][0]['a', 1] | @state['k'][1][0][('a', 1)]
state = {'k': (None, collections.deque([{('a', 1): ONES}]))}

container | next(iter(pool))[0] | @pool (a member)[0]
pool = {(ONES, 1)}

container | next(iter(table)) | @table (a key)
table = {ONES: 1}

container | ring[0] | @ring[0]
ring = [ONES]; ring.append(ring)

attribute | box.t | @box.t
box = Box(); box.t = ONES; vars(box)

attribute | box.t | @box.t
box = Slotted(); box.t = ONES

attribute | space.t | @space.t
space = types.SimpleNamespace(t=ONES)

attribute | Registry.t[0] | @Registry.t[0]
class Registry:
    t = [ONES]

attribute | model.encoder['layers'][0].weight | Model.encoder.layers[0].weight, held by @model
model = Model()

global | CACHE[0]['Out'][3] | notebook.Out[3]
CACHE.append({'__name__': 'notebook', '__builtins__': {}, 'Out': {3: ONES}})

closure | call() | CLOSURE @call
call = closing(ONES)

closure | layer._forward_hooks[0]() | CLOSURE Linear._forward_hooks[0], held by @layer
layer = torch.nn.Linear(1, 1); layer._forward_hooks[0] = closing(ONES)

closure | weight._backward_hooks[0]() | CLOSURE @weight._backward_hooks[0]
weight = torch.zeros(1).requires_grad_(); weight._backward_hooks = {0: closing(ONES)}

closure | call.__callback__() | CLOSURE @call.__callback__
box = Box(); call = weakref.ref(box, closing(ONES))

default | calls[0].__defaults__[0] | default of @<lambda>: x, held by @calls[0]
calls = [lambda x=ONES: x]

partial | call.args[0] | partial of print: args[0], held by @call
call = functools.partial(print, ONES)

default | f.__kwdefaults__['c'] | default of @f: c
def f(*, c=ONES): pass

partial | call.keywords['key'] | partial of max: keywords['key'], held by @call
call = functools.partial(max, key=ONES)

method | calls[0].__self__.cache['k'] | Model.cache['k'], held by the bound method @calls[0]
calls = [Model().forward]

method | call.__self__ | Tensor, held by the bound method @call
call = ONES.sum

cache | cached(3) | lru_cache of @cached
@functools.lru_cache
def cached(n):
    return torch.ones(n)

container | rows[1, 2]['loss'] | @rows.flat[5]['loss']
rows = np.empty((2, 3), object); rows[1, 2] = {'loss': ONES}

container | outer[0][0] | @outer.flat[0].base.flat[1]
inner, outer = np.empty(4, object), np.empty(2, object)
inner[1], outer[0] = ONES, inner[1:]; del inner

view | view._base | a view in @view
view = ONES[:1]

autograd | refs[0]() | MulBackward0 (saved other) in the graph of @loss
t = ONES; loss = (torch.ones(3, requires_grad=True) * t).sum()
refs = [weakref.ref(t)]; del t

attribute | weight.grad | @weight.grad
weight = torch.nn.Parameter(ONES); weight.grad = ONES

attribute | optimizer.state[weight]['exp_avg'] | @optimizer.state[<Parameter>]['exp_avg']
weight = torch.nn.Parameter(ONES); weight.grad = ONES
optimizer = torch.optim.Adam([weight]); optimizer.step()

generator | refs[0]() | generator generate: local t, held by @generator
refs = []; generator = generate(refs); next(generator)

generator | refs[0]() | coroutine @task: local t, held by @coroutine
async def task(refs):
    t = ONES
    refs.append(weakref.ref(t))
    await pause()
refs = []; coroutine = task(refs); coroutine.send(None)

generator | refs[0]() | async generator @stream: local t, held by @generator
async def stream(refs):
    t = ONES
    refs.append(weakref.ref(t))
    yield
    del t
refs = []; generator = stream(refs)
with contextlib.suppress(StopIteration): generator.asend(None).send(None)

traceback | refs[0]() | traceback of ValueError in boom(): local q, held by @stored
refs = []
try: boom(refs)
except ValueError as error: stored = error

unknown | ref() | list[0], which nothing with a name was found to hold
deep = [ONES]; ref = weakref.ref(deep[0])
for _ in range(50): deep = [deep]
"""


def spelled(text):
    closure = "closure of closing.<locals>.<lambda>: t, held by"
    names = {"CLOSURE": closure, "HERE": HERE, "@": "place.<locals>."}
    for short, long in names.items():
        text = text.replace(short, long)
    return text


@pytest.mark.parametrize("place", PLACES.strip().split("\n\n"))
def test_what_holds_a_tensor_has_its_kind_and_its_name_and_the_balance_is_even(place):
    facts, setup = place.replace("ONES", "torch.ones(3)").split("\n", 1)
    kind, tensor, chain = facts.split(" | ")
    found, (n_references, n_unexplained, count) = held_in(setup, tensor)
    assert found == [(kind, spelled(chain))]
    assert (n_references, n_unexplained) == (count, 0)


# --- variables


def test_a_variable_of_every_frame_is_named_and_recursion_repeats_it_once():
    def descend(t, depth):
        return find_holders([t])[0] if depth == 0 else descend(t, depth - 1)

    expected = [Holder("frame-local", here("descend.<locals>.t"), running=True)]
    assert descend(torch.ones(3), 5) == expected


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


# --- closures


def test_a_captured_variable_of_a_running_function_is_still_its_variable():
    t = torch.ones(3)

    def inner():
        return t

    assert running(weakref.ref(t)) == [True, True]
    CACHE.append(inner)
    assert running(weakref.ref(t)) == [True, False]


# --- code that stands still


REQUEST = contextvars.ContextVar("request")


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


class Rows(np.ndarray):
    """An array that the collector tracks."""


@pytest.mark.usefixtures("whole_heap")
def test_arrays_and_the_last_error_are_found_where_the_collector_no_longer_looks(monkeypatch):
    shared = {
        "view": lambda t: t.view(1, 3).numpy(),
        "slice": lambda t: t.detach().numpy()[1:],
        "asarray": np.asarray,
        "needs no gradient": lambda t: t.requires_grad_().numpy(force=True),
        "buffer": lambda t: memoryview(t.numpy()).obj,
        "tuple": lambda t: (t.numpy(), 1),
        "dictionary": lambda t: {"k": (t.numpy(),)},
    }
    of_objects = {
        "subclass": (lambda a: a.view(Rows), ".base"),
        "in a tuple": (lambda a: (a, 1), "[0]"),
        "masked": (lambda a: np.ma.masked_array(a, [True, False]), ".base"),
    }
    kept = [torch.ones(3) for _ in shared]
    ARRAYS.update((name, make(t)) for t, (name, make) in zip(kept, shared.items(), strict=True))
    inner = []
    for name, (wrap, _) in of_objects.items():
        objects = np.empty(2, object)
        objects[0] = torch.ones(3)
        inner.append(weakref.ref(objects[0]))
        ARRAYS[name] = wrap(objects)
    del objects
    try:
        boom(inner)
    except ValueError as error:
        monkeypatch.setattr(sys, "last_value", error, raising=False)
    gc.collect()
    t = torch.ones(3)
    array = t.numpy()
    *found, mine = find_holders([*kept, *(ref() for ref in inner), t])
    assert [(h.kind, h.running) for h in mine] == [("frame-local", True), ("numpy", True)]
    chains = [[(h.kind, h.chain) for h in each] for each in found]
    for index, (name, there) in enumerate(zip(shared, chains, strict=False)):
        place = f"numpy array {HERE}.ARRAYS['{name}']"
        place += {"tuple": "[0]", "dictionary": "['k'][0]"}.get(name, "")
        assert there == [("container", here(f"kept[{index}]")), ("numpy", place)]
    expected = [
        [("global", f"{HERE}.ARRAYS['{name}']{spelled}.flat[0]")]
        for name, (_, spelled) in of_objects.items()
    ]
    last = "traceback of ValueError in boom(): local q, held by sys.last_value"
    assert chains[len(shared) :] == [*expected, [("traceback", last)]]
    assert array is not None


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


def test_hostile_objects_are_named_like_any_other():
    hostile, dead = Hostile(torch.ones(3)), Box()
    ref = weakref.ref(object.__getattribute__(hostile, "t"))
    table = {hostile: ref(), "dead": weakref.proxy(dead)}
    del dead
    assert set(held(ref)) == {
        ("attribute", here("hostile.t")),
        ("container", here("table[<Hostile>]")),
    }
    assert len(table) == 2


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


def test_a_search_leaves_no_garbage_and_keeps_nothing():
    box = Box()
    box.t, box.me = torch.ones(3), box
    ref, view, array = weakref.ref(box.t), box.t[:1], box.t.numpy()
    held(ref)  # the first search of a process may import
    gc.collect()
    gc.disable()
    try:
        held(ref)
        assert gc.collect() == 0
    finally:
        gc.enable()
    assert view.data_ptr() == array.ctypes.data
    del box, view, array
    gc.collect()
    assert ref() is None


def test_ten_thousand_tensors_in_one_list_take_one_look_at_the_heap(monkeypatch):
    history = [torch.empty(0) for _ in range(10_000)]
    looks = []
    of = Index.of
    monkeypatch.setattr(Index, "of", lambda *args: looks.append(1) or of(*args))
    *found, again = find_holders([*history, history[0]])
    name = here("history")
    assert [h.chain for (h,) in found] == [f"{name}[{i}]" for i in range(10_000)]
    assert again == found[0]
    # near the variables, then in the heap
    assert len(looks) == 2


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


# --- in public words: a list of names, and a balance that adds up

K = f"{HERE}.CACHE[0]"


def test_a_parameter_makes_up_for_no_other_holder():
    def look(u):
        CACHE.append(lambda x=u: x)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(u))
        found = holders(u)
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(u))
        return found

    t = torch.ones(3)
    found = look(t)
    name = "test_a_parameter_makes_up_for_no_other_holder.<locals>"
    default = f"default of {name}.look.<locals>.<lambda>: x, held by {K}"
    assert {f"{name}.t", f"{name}.look.<locals>.u", default} <= set(found)
    assert (found.n_references, found.n_unexplained) == (4, 1)
    assert found[-1].startswith("1 reference without a name")


def test_what_is_kept_where_torch_compile_evaluates_the_frames_is_no_reference():
    def look(t, *more):
        return holders(t), holders(more[0])

    def call():
        t, other = torch.ones(3), torch.ones(3)
        return [(list(found), found.n_references) for found in look(t, other)]

    assert torch._dynamo.run(call)() == call()
    code = compile("kept = [ones(3)]\nfound = holders(kept[0])", "module", "exec")
    names = {"holders": holders, "ones": torch.ones}
    torch._dynamo.run(exec)(code, names)
    assert (names["found"].n_references, names["found"].n_unexplained) == (1, 0)


def test_printed_it_begins_with_the_balance():
    t = torch.ones(3)
    CACHE.append(t)
    found = holders(t)
    assert isinstance(found, list)
    assert str(found) == (
        "float32[3] on cpu, 12 B: 2 references, 2 explained, 0 unexplained:\n"
        "  test_printed_it_begins_with_the_balance.<locals>.t\n"
        f"  {K}"
    )
    assert holders(t) == found
    found.append("a guess")
    found.remove(K)
    assert str(found).endswith("\n  a guess")
    again = pickle.loads(pickle.dumps(found))
    assert (again, str(again)) == (found, str(found))
    assert isinstance(again, HolderList)


def test_what_is_no_tensor_is_refused():
    with pytest.raises(
        ProfilerUsageError, match=r"wants a tensor or a module, and got list\. Pass the"
    ):
        holders([torch.ones(3)])


def test_a_disposed_tensor_has_holders_and_the_site_of_a_scope_is_told():
    with NewDisposeScope("step", capture="site"):
        t = torch.ones(3)
        CACHE.append(t)
        assert ", created at " in holders(t).summary()
    found = holders(t)
    assert found == [
        "test_a_disposed_tensor_has_holders_and_the_site_of_a_scope_is_told.<locals>.t",
        K,
    ]
    assert found.summary().startswith("<DisposedTensor float32[3] on cpu, 12 B, ")
    assert found.summary().endswith(">: 2 references, 2 explained, 0 unexplained")


def test_a_module_is_told_with_what_it_weighs_and_its_balance():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    (shown,) = str(holders(model)).splitlines()[1:]
    assert shown.endswith("<locals>.model")
    assert holders(model).summary() == (
        "Sequential with 2 tensors, 24 B: 1 reference, 1 explained, 0 unexplained"
    )
    (name,) = holders(model[0])
    assert name.startswith("Sequential[0], held by ")
