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


def test_what_is_registered_for_a_model_may_end_while_another_is_registered():
    """As where a garbage collection in between ends a model: on the same thread, inside."""
    registry = _Registry()
    ending = Member()
    registry.add(ending)

    class Colliding(Member):
        def __hash__(self):
            registry.discard(ending)
            return 1

    member = Colliding()
    registry.add(member)
    assert registry.alive() == [member]
