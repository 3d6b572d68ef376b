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


@pytest.mark.parametrize(
    ("error", "carried"),
    [
        (_errors.PagingError, {"minimum_bytes": 7}),
        (_errors.OutOfRetriesError, {"sizes": (4, 2), "info": "what torch said"}),
        (_errors.BatchCoupledError, {"names": ("norm",)}),
        (_errors.SplitMismatchError, {"whole": 1.0, "split": 2.0, "advice": "declare it"}),
        (_errors.RemoteRankError, {"rank": 3, "cause": "ValueError: no"}),
        (_errors.MissingTorchNameError, {"name": "torch._x"}),
        (_errors.ScopeLeakError, {"report": "the tensors"}),
    ],
)
def test_what_an_error_carries_travels_with_it(error, carried):
    made = error("what happened", **carried)
    made.add_note("seen on rank 1")
    copy = pickle.loads(pickle.dumps(made))
    assert {name: getattr(copy, name) for name in carried} == carried
    assert copy.__notes__ == ["seen on rank 1"]


def test_a_courtesy_stays_in_its_process():
    made = _errors.CourtesyError("what happened", courtesy=object())
    assert pickle.loads(pickle.dumps(made)).courtesy is None
