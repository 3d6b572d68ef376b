"""What decorated functions of all kinds have in common: looks, copies, and who calls them."""

import pytest

from tenure import adaptive

pytestmark = pytest.mark.usefixtures("forgetful")


class Task:
    """A callable object whose attributes are called like those of what wraps it."""

    def __init__(self):
        self.done = []
        self.note = "of the task"
        self.__wrapped__ = print
        self._run = self._begin = self._remembered = self._bound = lambda *args: None

    def __call__(self, start, end):
        self.done.append((start, end))


def test_attributes_of_what_is_wrapped_take_the_place_of_no_method():
    task = Task()
    f = adaptive.range(initial_step=4)(task)
    f(0, 10)
    assert task.done == [(0, 4), (4, 8), (8, 10)]
    assert f.note == "of the task"
    assert f.__wrapped__ is task
