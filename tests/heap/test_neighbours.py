"""What is near to the variables is asked first, and believed only where nothing is left over."""

import gc

import pytest
import torch

from tenure.profiler import holders


class Box:
    def __init__(self, held=None):
        self.held = held


def test_the_heap_is_asked_for_what_is_left_over():
    near, away = [torch.ones(1)], []
    holder_of_all = [None] * 2000
    away.append(near[0])
    holder_of_all[0] = away
    del away
    found = holders(near[0])
    assert sorted(chain.split("<locals>.")[1] for chain in found) == [
        "holder_of_all[0][0]",
        "near[0]",
    ]


def test_an_object_that_is_held_twice_is_not_explained_by_one_holder_that_was_found_twice():
    box = Box(torch.ones(1))
    many = [None] * 1024 + [box.held]
    vars(box)["again"] = box.held
    found = holders(many[-1])
    assert (len(found), found.n_references, found.n_unexplained) == (3, 3, 0)


def test_a_reference_without_a_name_is_counted_beside_what_is_near():
    box = Box(torch.ones(1))
    unseen = iter([box.held]).__reduce__  # a method of C code that holds an iterator
    found = holders(box.held)
    assert len(found) == 2
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
    (chain,) = holders(list.__getitem__(loud, 0))
    assert chain.endswith("<locals>.loud[0]")


@pytest.mark.usefixtures("whole_heap")
def test_frozen_objects_are_found_near():
    box = Box([torch.ones(1)])
    gc.freeze()
    try:
        (chain,) = holders(box.held[0])
    finally:
        gc.unfreeze()
    assert chain.endswith("<locals>.box.held[0]")
