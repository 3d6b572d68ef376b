"""Errors travel: between processes, and to users who look them up where tracebacks say they are."""

import pickle

import pytest

from tenure import _errors

ERRORS = [
    value
    for value in vars(_errors).values()
    if isinstance(value, type) and issubclass(value, Exception)
]


@pytest.mark.parametrize("error", ERRORS)
def test_every_error_can_be_pickled(error):
    copy = pickle.loads(pickle.dumps(error("what happened")))
    assert type(copy) is error
    assert str(copy) == "what happened"
