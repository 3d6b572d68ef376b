"""The heap: its index finds every reference and keeps nothing, what is near is asked first.

Private names are asked, because what the profiler shows of a holder does not say where it was
looked for.
"""

import gc
import sys
import weakref

import pytest
import torch

from tenure._heap import (
    Index,
    _index,
    _search,
    find_holders,
    tracked_objects,
    wait_for_readers,
)

from ..programs import run_program


class Box:
    def __init__(self, held=None):
        self.held = held


class Slotted:
    __slots__ = ("__weakref__", "t")


@pytest.fixture
def nothing_is_near(monkeypatch):
    monkeypatch.setattr(_index, "_MAX_OBJECTS", 0)


def referrers_of(*asked):
    index = Index(tracked_objects())
    found = index.of(map(id, asked))
    index.close()
    return [each for each in found if each is not asked]


def identities(found):
    return set(map(id, found))


def test_the_index_finds_what_a_pass_finds(monkeypatch):
    monkeypatch.setitem(sys.modules, "numpy", None)
    t, other = torch.ones(1), torch.ones(1)
    places = [[t], (t, other), {"t": t}, {t: 1}, Box(), Slotted(), lambda: t]
    places[4].t = places[5].t = t
    t.me = places
    by_pass = identities(gc.get_referrers(t, other))
    by_index = identities(referrers_of(t, other))
    assert identities(places[:6]) <= by_index <= by_pass
    del t.me


@pytest.mark.usefixtures("nothing_is_near")
def test_a_search_that_fails_keeps_nothing(monkeypatch):
    box = Box()
    box.t = torch.ones(1)
    ref = weakref.ref(box)

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Index, "of", fail)
    with pytest.raises(KeyboardInterrupt):
        find_holders([box.t])
    gc.disable()
    try:
        del box
        assert ref() is None
    finally:
        gc.enable()


@pytest.mark.usefixtures("nothing_is_near")
def test_a_variable_that_a_generator_has_let_go_is_gone_after_two_searches():
    def keeping():
        kept, passing = [torch.ones(1)], torch.zeros(1)
        yield weakref.ref(kept[0]), weakref.ref(passing)
        del passing
        yield None
        yield kept

    generator = keeping()
    kept, passing = next(generator)
    for _ in range(2):
        ((holder,),) = find_holders([kept()])
        assert "local kept[0]" in holder.chain
    next(generator)
    assert passing() is None


# --- a thread that counts holders waits for one that has a list of all objects


def test_it_waits_until_the_other_thread_has_freed_its_list(monkeypatch):
    heaps = [tracked_objects()]
    # the other thread ends meanwhile
    monkeypatch.setattr("tenure._heap._collector.sleep", lambda seconds: heaps.clear())
    assert wait_for_readers()
    assert not heaps
    assert not wait_for_readers()


def test_it_gives_up_when_the_list_stays(monkeypatch):
    heap = tracked_objects()
    monkeypatch.setattr("tenure._heap._collector._MOST_WAIT_S", 0.0)
    assert not wait_for_readers()
    assert len(heap) > 0


# --- what is near to the variables is believed only where nothing is left over


@pytest.fixture
def asked(monkeypatch):
    """Looks at the whole heap."""
    questions = []
    look = _search.tracked_objects
    monkeypatch.setattr(_search, "tracked_objects", lambda: questions.append(1) or look())
    return questions


def without_neighbours(monkeypatch, objects):
    with monkeypatch.context() as patch:
        patch.setattr(_index, "_MAX_OBJECTS", 0)
        return find_holders(objects, ignore=[objects])


def test_what_a_variable_leads_to_is_named_without_a_look_at_the_heap(asked, monkeypatch):
    monkeypatch.setattr(_index, "_MAX_OBJECTS", 1 << 20)  # pytest's own frames may hold many
    root = Box([Box({"deep": [Box((torch.ones(1),))]})])
    ((holder,),) = find_holders([root.held[0].held["deep"][0].held[0]])
    assert holder.chain.endswith("<locals>.root.held[0].held['deep'][0].held[0]")
    assert asked == []


def test_an_object_that_is_held_twice_is_not_explained_by_one_holder_that_was_found_twice():
    box = Box(torch.ones(1))
    many = [None] * _index._MAX_ITEMS + [box.held]
    vars(box)["again"] = box.held
    (found,) = find_holders([many[-1]])
    assert len(found) == 3
    assert all(holder.named for holder in found)


def test_the_answer_is_that_of_the_whole_heap(monkeypatch):
    t, kept = torch.ones(1), [torch.zeros(1)]
    box = Box({"t": t, "list": [kept[0], kept[0]], "box": Box(kept)})
    box.me = box
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    view = box.held["list"][0][:0]

    def reads():
        return box, module

    objects = [t, kept[0], *module.parameters(), box, kept]
    near = find_holders(objects, ignore=[objects])
    assert near == without_neighbours(monkeypatch, objects)
    assert all(near)
    assert all((optimizer, view is not None, reads))


def test_a_reference_without_a_name_is_counted_beside_what_is_near(monkeypatch):
    box = Box(torch.ones(1))
    unseen = iter([box.held]).__reduce__  # a method of C code that holds an iterator
    objects = [box.held]
    near = find_holders(objects, ignore=[objects])
    assert near == without_neighbours(monkeypatch, objects)
    assert len(near[0]) == 2
    assert unseen


# --- objects that `gc.freeze` hides, in a process of their own: nothing undoes it for one test

FROZEN = """
import gc, torch, weakref
from tenure._heap import find_holders, instances, tracked_objects
from tenure.profiler import holders

class Box:
    pass

def chains(ref):
    return [holder.chain for holder in find_holders([ref()])[0]]

def train():
    kept = torch.ones(3)
    alias = [kept]
    gc.freeze()
    return holders(kept)

HISTORY, BOX, inner = [torch.ones(3)], Box(), [torch.ones(3)]
BOX.cache = {"k": torch.ones(3)}
print(train())
OUTER = {"inner": inner}
del inner
print(chains(weakref.ref(HISTORY[0])))
print(chains(weakref.ref(BOX.cache["k"])))
print(chains(weakref.ref(OUTER["inner"][0])))
found = tracked_objects()
print(len(found) == len(set(map(id, found))), any(each is found for each in found))
print([t is HISTORY[0] for t in instances(found, torch.Tensor)].count(True))
"""


def test_what_is_frozen_is_found_once_with_its_names():
    done = run_program(FROZEN)
    assert (done.stdout.splitlines(), done.stderr) == (
        [
            "float32[3] on cpu, 12 B: 2 references, 2 explained, 0 unexplained:",
            "  train.<locals>.kept",
            "  train.<locals>.alias[0]",
            "['__main__.HISTORY[0]']",
            "[\"__main__.BOX.cache['k']\"]",
            "[\"__main__.OUTER['inner'][0]\"]",
            "True False",
            "1",
        ],
        "",
    )


ASYNCIO = """
import asyncio, gc, resource, torch, weakref
from tenure._heap import find_holders, tracked_objects
CACHE = [torch.ones(3)]

async def wait():
    future = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(future.set_result, 1)
    return await future

asyncio.run(wait())
gc.freeze()
_, hard = resource.getrlimit(resource.RLIMIT_CPU)
resource.setrlimit(resource.RLIMIT_CPU, (60, hard))
for _ in range(2):
    for start in range(0, len(heap := tracked_objects()), 1000):
        gc.get_referents(*heap[start : start + 1000])
    del heap
    print([holder.chain for holder in find_holders([asyncio.Future])[0] if holder.named][:1])
    print([holder.chain for holder in find_holders([CACHE[0]])[0]])
"""


@pytest.mark.slow
def test_the_free_objects_that_asyncio_shows_end_no_search():
    """On Python 3.12 the second look at them would not end; who looks must not start a ring."""
    done = run_program(ASYNCIO)
    expected = "['Future']\n['__main__.CACHE[0]']\n" * 2
    assert (done.stdout, done.stderr) == (expected, "")
