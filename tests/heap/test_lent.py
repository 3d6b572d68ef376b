"""The frame of the interpreter tells which parameters add no reference to their object."""

import sys

import pytest
import torch

from tenure._errors import TenureError
from tenure._heap import _lent
from tenure.profiler import holders

pytestmark = pytest.mark.skipif(
    not _lent.LENDS, reason="up to Python 3.13 every parameter adds a reference"
)


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


def test_arguments_that_wait_for_a_call_are_in_flight():
    def look(given):
        return _lent.values_in_flight(sys._getframe(1))

    def caller():
        return [made := object(), look(object())], id(made)

    (made, found), _ = caller()
    assert found == [id(made)]


def test_a_frame_of_another_layout_is_refused(monkeypatch):
    monkeypatch.setattr(_lent, "_is_as_expected", lambda: False)
    with pytest.raises(TenureError, match=r"Python 3\.\d+.* keeps the variables .* update tenure"):
        holders(torch.ones(1))
