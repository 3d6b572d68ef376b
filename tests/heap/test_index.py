"""The index of the heap gives the answers of the collector's own passes, and keeps nothing."""

import gc
import sys
import weakref

import numpy as np
import pytest
import torch

from tenure._heap import _index, find_holders
from tenure._heap._index import Referrers


class Box:
    pass


class Slotted:
    __slots__ = ("__weakref__", "t")


@pytest.fixture
def indexed(monkeypatch):
    """No question is answered by a pass of the collector, nor by what is near."""
    monkeypatch.setattr(_index, "_MAX_OBJECTS", 0)
    monkeypatch.setattr(_index, "_MAX_PASSES", 0)


def referrers_of(*asked):
    referrers = Referrers()
    referrers.get_ready(len(asked))
    found = referrers.of([*asked])
    referrers.close()
    return found


def identities(found):
    return [id(each) for each in found]


@pytest.mark.parametrize("n", [1, 2])
def test_the_tuple_of_a_pass_is_no_holder_and_one_like_it_is(n):
    boxes = [Box() for _ in range(n)]
    assert [found for found in Referrers().of(boxes) if type(found) is tuple] == []
    kept = tuple(boxes)
    assert [found for found in Referrers().of(boxes) if found is kept] == [kept]


def test_the_index_finds_what_a_pass_finds(monkeypatch):
    t, other = torch.ones(1), torch.ones(1)
    places = [[t], (t, other), {"t": t}, {t: 1}, Box(), Slotted(), lambda: t]
    places[4].t = places[5].t = t
    t.me = places
    by_pass = identities(referrers_of(t, other))
    monkeypatch.setattr(_index, "_MAX_PASSES", 0)
    by_index = identities(referrers_of(t, other))
    assert set(identities(places[:6])) <= set(by_pass)
    assert by_index == by_pass
    del t.me


@pytest.mark.usefixtures("indexed")
def test_what_the_collector_does_not_track_is_found_as_well():
    array = np.ones(3)
    assert not gc.is_tracked(array)
    box = [array]
    assert any(found is box for found in referrers_of(array))


@pytest.mark.usefixtures("indexed")
def test_a_dictionary_that_is_made_after_the_index_is_a_holder_and_has_one():
    box = Box()
    box.t, box.me = torch.ones(1), box
    referrers = Referrers()
    referrers.get_ready(1)
    attributes = vars(box)
    if sys.version_info[:2] != (3, 13):
        assert any(found is attributes for found in referrers.of([box]))
        assert any(found is box for found in referrers.of([attributes]))
    else:  # there the collector goes on to see the values in the instance
        assert any(found is box for found in referrers.of([box]))
    referrers.close()


@pytest.mark.usefixtures("indexed")
def test_it_holds_each_object_once_until_it_is_closed_and_says_so():
    t = torch.ones(1)
    plain = sys.getrefcount(t)
    referrers = Referrers()
    assert t not in referrers
    referrers.get_ready(1)
    assert t in referrers
    assert torch.ones(1) not in referrers
    assert sys.getrefcount(t) == plain + 1
    referrers.close()
    assert t not in referrers
    assert sys.getrefcount(t) == plain


@pytest.mark.usefixtures("indexed")
def test_a_search_that_fails_keeps_nothing(monkeypatch):
    box = Box()
    box.t = torch.ones(1)
    ref = weakref.ref(box)

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Referrers, "of", fail)
    with pytest.raises(KeyboardInterrupt):
        find_holders([box.t])
    gc.disable()
    try:
        del box
        assert ref() is None
    finally:
        gc.enable()


@pytest.mark.usefixtures("indexed")
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
