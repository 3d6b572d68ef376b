"""Who is registered is asked as long as it lives, and is kept by nothing."""

import gc

from tenure._registries import _Registry


class Member:
    pass


def test_members_are_asked_in_the_order_in_which_they_came_as_long_as_they_live():
    registry = _Registry()
    first, second, third = Member(), Member(), Member()
    for each in (first, second, third, first):
        registry.add(each)
    registry.discard(second)
    registry.discard(second)
    assert registry.alive() == [first, third]
    del first, each
    gc.collect()
    assert registry.alive() == [third]
