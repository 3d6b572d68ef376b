"""The heap: its index finds every reference and keeps nothing, what is near is asked first.

Private names are asked, because what the profiler shows of a holder does not say where it was
looked for.
"""

import gc
import itertools
import sys
import weakref
from contextlib import contextmanager

import pytest
import torch

from tenure import TenureError
from tenure._heap import (
    Index,
    _index,
    _lent,
    _search,
    find_holders,
    tracked_objects,
    wait_for_readers,
)
from tenure._heap._reading import read_locals
from tenure.profiler import holders, snapshot

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
    view = box.held["list"][0][:0]

    def reads():
        return box, module

    objects = [t, kept[0], *module.parameters(), box, kept]
    near = find_holders(objects, ignore=[objects])
    assert near == without_neighbours(monkeypatch, objects)
    assert all(near)
    assert all((view is not None, reads))


# --- objects that `gc.freeze` hides, in a process of their own: nothing undoes it for one test

FROZEN = """
import asyncio, gc, resource, torch, weakref
from tenure._heap import find_holders, instances, tracked_objects
from tenure.profiler import holders

class Box:
    pass

def train():
    kept = torch.ones(3)
    alias = [kept]
    gc.freeze()
    return holders(kept)

async def wait():
    future = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(future.set_result, 1)
    return await future

HISTORY, BOX, inner = [torch.ones(3)], Box(), [torch.ones(3)]
BOX.cache = {"k": torch.ones(3)}
asyncio.run(wait())
print(train())
OUTER = {"inner": inner}
del inner
refs = [weakref.ref(t) for t in (HISTORY[0], BOX.cache["k"], OUTER["inner"][0])]
for found in find_holders([ref() for ref in refs]):
    print([holder.chain for holder in found])
_, hard = resource.getrlimit(resource.RLIMIT_CPU)
resource.setrlimit(resource.RLIMIT_CPU, (60, hard))
for _ in range(2):
    found = tracked_objects()
    print(len(found) == len(set(map(id, found))), any(each is found for each in found))
    print([t is HISTORY[0] for t in instances(found, torch.Tensor)].count(True))
    for start in range(0, len(found), 1000):
        gc.get_referents(*found[start : start + 1000])
    del found
    print([holder.chain for holder in find_holders([asyncio.Future])[0] if holder.named][:1])
"""


def test_what_is_frozen_is_found_once_with_its_names_and_free_objects_of_asyncio_end_no_search():
    """On Python 3.12 the second look at them would not end; who looks must not start a ring."""
    done = run_program(FROZEN)
    assert (done.stdout.splitlines(), done.stderr) == (
        [
            "float32[3] on cpu, 12 B: 2 references, 2 explained, 0 unexplained:",
            "  train.<locals>.kept",
            "  train.<locals>.alias[0]",
            "['__main__.HISTORY[0]']",
            "[\"__main__.BOX.cache['k']\"]",
            "[\"__main__.OUTER['inner'][0]\"]",
            *("True False", "1", "['Future']") * 2,
        ],
        "",
    )


lends = pytest.mark.skipif(
    not _lent.LENDS, reason="up to Python 3.13 every parameter adds a reference"
)


@contextmanager
def stopping_in(function, act):
    """Call ``act`` with the frame at every line of a function, as a debugger does at its prompt."""
    before = sys.gettrace()

    def trace(frame, *_):
        if frame.f_code is function.__code__:
            act(frame)
            return trace
        return None

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def step():
    x = torch.ones(3)
    x = x + 1
    return x + 1


def test_variables_outlive_a_report_from_inside_a_trace_function():
    n_stops = itertools.count()
    # where it is one, and where it is two
    with stopping_in(step, lambda _: next(n_stops) in (2, 3) and snapshot()):
        assert step().tolist() == [3, 3, 3]
    assert next(n_stops) > 3


def test_a_debugger_that_holds_the_variables_can_still_set_them():
    def edit(frame):
        mine = frame.f_locals
        read_locals(frame)
        if "x" in mine:
            mine["x"] = torch.zeros(3)

    with stopping_in(step, edit):
        assert step().tolist() == [1, 1, 1]


# --- parameters that add no reference to their object


@lends
def test_a_parameter_that_gets_a_variable_of_the_caller_is_lent():
    def look(lent, given, *rest, by_name, **others):
        return _lent.lent_parameters(sys._getframe())

    def captured(lent):
        return lambda: lent, _lent.lent_parameters(sys._getframe())

    def generator(lent):
        yield _lent.lent_parameters(sys._getframe())

    variable = object()
    # a call in an assert keeps its arguments in variables
    found = look(variable, object(), variable, by_name=variable, more=1)
    assert found == {"lent", "by_name"}
    assert captured(variable)[1] == frozenset()
    assert next(generator(variable)) == frozenset()


@lends
def test_a_frame_of_another_layout_is_refused(monkeypatch):
    monkeypatch.setattr(_lent, "_is_as_expected", lambda: False)
    with pytest.raises(TenureError, match=r"Python 3\.\d+.* keeps the variables .* update tenure"):
        holders(torch.ones(1))
