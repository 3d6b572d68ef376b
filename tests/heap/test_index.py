"""The index of the heap finds every reference, with NumPy and without, and keeps nothing."""

import gc
import sys
import weakref

import numpy as np
import pytest
import torch

from tenure._heap import Index, _index, find_holders, tracked_objects, wait_for_readers


class Box:
    pass


class Slotted:
    __slots__ = ("__weakref__", "t")


@pytest.fixture(autouse=True)
def _nothing_is_near(monkeypatch):
    monkeypatch.setattr(_index, "_MAX_OBJECTS", 0)


def referrers_of(*asked):
    index = Index(tracked_objects())
    found = index.of(map(id, asked))
    index.close()
    return [each for each in found if each is not asked]


def identities(found):
    return set(map(id, found))


@pytest.mark.parametrize("has_numpy", [True, False])
def test_the_index_finds_what_a_pass_finds(monkeypatch, has_numpy):
    if not has_numpy:
        monkeypatch.setitem(sys.modules, "numpy", None)
    t, other = torch.ones(1), torch.ones(1)
    places = [[t], (t, other), {"t": t}, {t: 1}, Box(), Slotted(), lambda: t]
    places[4].t = places[5].t = t
    t.me = places
    by_pass = identities(gc.get_referrers(t, other))
    by_index = identities(referrers_of(t, other))
    assert identities(places[:6]) <= by_index <= by_pass
    del t.me


def test_what_the_collector_does_not_track_is_found_as_well():
    array = np.ones(3)
    assert not gc.is_tracked(array)
    box = [array]
    assert any(found is box for found in referrers_of(array))


def test_a_dictionary_that_is_made_after_the_index_is_a_holder_and_has_one():
    box = Box()
    box.t, box.me = torch.ones(1), box
    index = Index(tracked_objects())
    attributes = vars(box)
    if sys.version_info[:2] != (3, 13):
        assert any(found is attributes for found in index.of([id(box)]))
        assert any(found is box for found in index.of([id(attributes)]))
    else:  # there the collector goes on to see the values in the instance
        assert any(found is box for found in index.of([id(box)]))
    index.close()


def test_it_holds_each_object_once_until_it_is_closed_and_says_so():
    t = torch.ones(1)
    plain = sys.getrefcount(t)
    index = Index(tracked_objects())
    assert t in index
    assert torch.ones(1) not in index
    assert sys.getrefcount(t) == plain + 1
    index.close()
    assert t not in index
    assert sys.getrefcount(t) == plain


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
