"""What is asked about, wherever it stands, counts as the one that was measured."""

import sys

import pytest

from tenure._torch.counting import SOLE


class Entry:
    def __init__(self):
        self.found = object()

    def count(self):
        found = self.found
        return sys.getrefcount(found)


def of_an_item():
    items = [object()]
    found = items[0]
    return sys.getrefcount(found)


def of_an_attribute():
    return Entry().count()


def in_a_comprehension():
    items = [object()]
    return next(iter({sys.getrefcount(found) for found in items}))


def in_a_loop():
    items = [object()]
    for found in items:
        count = sys.getrefcount(found)
    return count


@pytest.mark.parametrize("count", [of_an_item, of_an_attribute, in_a_comprehension, in_a_loop])
def test_what_a_container_holds_counts_one_more_than_what_a_variable_alone_holds(count):
    assert count() == SOLE + 1


def test_what_was_popped_counts_as_what_a_variable_alone_holds():
    items = [object()]
    found = items.pop()
    assert sys.getrefcount(found) == SOLE
