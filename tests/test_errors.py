"""Errors travel: between processes, and to users who look them up where tracebacks say they are."""

import pickle

import pytest

import tenure
from tenure import (
    MissingTorchNameError,
    ScopeLeakError,
    TenureError,
    TenureWarning,
    adaptive,
    paging,
    profiler,
    testing,
)
from tenure.adaptive import (
    BatchCoupledError,
    OutOfRetriesError,
    RemoteRankError,
    SplitMismatchError,
)
from tenure.paging import PagingError
from tenure.profiler import CourtesyError


def kinds_of(error):
    """It, and all errors of tenure below it."""
    yield error
    for below in error.__subclasses__():
        if below.__module__.partition(".")[0] == "tenure":
            yield from kinds_of(below)


ERRORS = list(dict.fromkeys([*kinds_of(TenureError), *kinds_of(TenureWarning)]))


def test_every_public_error_is_one_of_tenure():
    rooms = tenure, adaptive, paging, profiler, testing
    public = [getattr(room, name) for room in rooms for name in dir(room)]
    errors = {each for each in public if isinstance(each, type) and issubclass(each, Exception)}
    assert {each for each in errors if each.__module__.startswith("tenure")} <= {*ERRORS}
    assert len(errors) > 20


@pytest.mark.parametrize("error", ERRORS)
def test_every_error_can_be_pickled(error):
    copy = pickle.loads(pickle.dumps(error("what happened")))
    assert type(copy) is error
    assert str(copy) == "what happened"


@pytest.mark.parametrize(
    ("error", "carried"),
    [
        (PagingError, {"minimum_bytes": 7}),
        (OutOfRetriesError, {"sizes": (4, 2), "info": "what torch said"}),
        (BatchCoupledError, {"names": ("norm",)}),
        (SplitMismatchError, {"whole": 1.0, "split": 2.0, "advice": "declare it"}),
        (RemoteRankError, {"rank": 3, "cause": "ValueError: no"}),
        (MissingTorchNameError, {"name": "torch._x"}),
        (ScopeLeakError, {"report": "the tensors"}),
    ],
)
def test_what_an_error_carries_travels_with_it(error, carried):
    made = error("what happened", **carried)
    made.add_note("seen on rank 1")
    copy = pickle.loads(pickle.dumps(made))
    assert {name: getattr(copy, name) for name in carried} == carried
    assert copy.__notes__ == ["seen on rank 1"]


def test_a_courtesy_stays_in_its_process():
    made = CourtesyError("what happened", courtesy=object())
    assert pickle.loads(pickle.dumps(made)).courtesy is None
