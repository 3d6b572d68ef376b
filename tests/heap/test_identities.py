"""Identities read from the memory of lists are those that `id` tells, with NumPy and without."""

import pytest

from tenure._heap import _identities, find_holders
from tenure._heap._identities import Identities, IdentitySet, References


@pytest.fixture(params=["with NumPy", "without NumPy"])
def _both_ways(request, monkeypatch):
    if request.param == "without NumPy":
        monkeypatch.setattr(_identities, "_numpy", lambda: None)


pytestmark = pytest.mark.usefixtures("_both_ways")


def test_numpy_is_used_where_it_is_loaded(monkeypatch):
    monkeypatch.undo()
    assert _identities._numpy() is not None


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_numbers_are_identities_in_order(count):
    objects = [object() for _ in range(count)]
    assert list(Identities(objects).numbers) == list(map(id, objects))
    assert list(Identities(objects).ordered()) == sorted(map(id, objects))


def test_wanted_objects_are_found_wherever_they_stand():
    objects = [object() for _ in range(100_000)]
    objects[70_000] = objects[3]
    wanted = IdentitySet(map(id, (objects[3], objects[500], object())))
    assert list(Identities(objects).where(wanted)) == [3, 500, 70_000]
    assert list(Identities(objects).where(IdentitySet(()))) == []


def test_each_identity_has_one_position_also_where_many_share_a_bucket():
    objects = [object() for _ in range(70_000)]  # more than there are buckets
    objects += objects[:1000]
    positions = Identities(objects).first_positions()
    assert len(positions) == 70_000
    assert {id(objects[position]) for position in positions} == set(map(id, objects))


def test_references_are_told_by_the_number_of_their_holder():
    a, b, c = object(), object(), object()
    references = References([[], [a, b], [], [c], [b, b], []])
    assert references.holders_of(IdentitySet([id(b)])) == [1, 4]
    assert references.holders_of(IdentitySet([id(a), id(c)])) == [1, 3]
    assert references.holders_of(IdentitySet([id(references)])) == []


def test_a_search_by_index_gives_the_same_names(monkeypatch):
    monkeypatch.setattr("tenure._heap._index._MAX_PASSES", 0)
    history = [{"k": [object()]}]
    ((holder,),) = find_holders([history[0]["k"][0]])
    assert holder.chain.endswith("<locals>.history[0]['k'][0]")
