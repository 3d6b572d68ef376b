"""Programs that run out of memory: the first line names the cause and the remedy.

Each names the culprit as well: a variable, a module, or a line.
"""

import pytest

from .planted import PLANTED, failure_of, run

_MOST_CHARACTERS = 160
_QUICK = ("losses", "outputs on a device", "tensors under a limit of the process")


def _case(one):
    marks = () if one.name in _QUICK else (pytest.mark.slow,)
    return pytest.param(one, id=one.name.replace(" ", "-"), marks=marks)


@pytest.mark.parametrize("planted", [*map(_case, PLANTED)])
def test_the_cause_of_a_planted_error_is_told(planted):
    report, done = run(planted, hides=planted.name != _QUICK[0])
    assert failure_of(planted, report) is None, done.stderr[-1500:]
    assert len(report["first_line"]) <= _MOST_CHARACTERS


def test_each_cause_is_planted():
    assert len(PLANTED) >= 30
    assert len({one.cause for one in PLANTED}) == 12
