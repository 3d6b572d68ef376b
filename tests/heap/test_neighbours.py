"""What is near to the variables is asked first, and believed only where nothing is left over."""

import gc

import pytest
import torch

from tenure._heap import _index, _search, find_holders


class Box:
    def __init__(self, held=None):
        self.held = held


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


def test_the_heap_is_asked_for_what_is_left_over(asked):
    near, away = [torch.ones(1)], []
    holder_of_all = [None] * (_index._MAX_ITEMS + 1)
    away.append(near[0])
    holder_of_all[0] = away
    del away
    (found,) = find_holders([near[0]])
    assert sorted(h.chain.split("<locals>.")[1] for h in found) == [
        "holder_of_all[0][0]",
        "near[0]",
    ]
    assert asked


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


def test_no_code_of_what_is_near_runs():
    class Hostile(type):
        def __eq__(cls, other):
            raise AssertionError

        def __hash__(cls):
            raise AssertionError

    class Loud(list, metaclass=Hostile):
        __class__ = property(lambda self: 1 / 0)

        def __len__(self):
            raise AssertionError

        def __iter__(self):
            raise AssertionError

    loud = Loud([torch.ones(1)])
    ((holder,),) = find_holders([list.__getitem__(loud, 0)])
    assert holder.chain.endswith("<locals>.loud[0]")


@pytest.mark.usefixtures("whole_heap")
def test_frozen_objects_are_found_near():
    box = Box([torch.ones(1)])
    gc.freeze()
    try:
        ((holder,),) = find_holders([box.held[0]])
    finally:
        gc.unfreeze()
    assert holder.chain.endswith("<locals>.box.held[0]")


def test_what_has_no_reference_left_is_not_looked_for_in_arrays(monkeypatch):
    """Reading all that the collector does not show takes longer than all else."""
    monkeypatch.setattr(_search, "hidden_objects", lambda: pytest.fail("no array may hold it"))
    x = torch.ones(3, requires_grad=True)
    kept = [x.sin().sum()]
    chains = [holder.chain.rpartition(".<locals>.")[2] for holder in find_holders([kept[0]])[0]]
    assert chains == ["kept[0]"]
    assert find_holders([x])[0][0].chain.endswith(".<locals>.x")
