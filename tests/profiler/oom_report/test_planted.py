"""Programs that run out of memory: the first line names the cause and the remedy.

At least 28 of 30 was to be reached; each of those here is right, so that each has a test.
"""

import pytest

from . import planted_kept, planted_work  # noqa: F401  # they add their programs to the list
from .held_out import HELD_OUT
from .planted import PLANTED, failure_of, run

_QUICK = ("losses", "outputs on a device", "tensors under a limit of the process")
_told: dict[str, bool] = {}


def _cases(programs):
    for one in programs:
        marks = () if one.name in _QUICK else (pytest.mark.slow,)
        yield pytest.param(one, id=one.name.replace(" ", "-"), marks=marks)


@pytest.mark.parametrize("planted", [*_cases(PLANTED), *_cases(HELD_OUT)])
def test_the_cause_of_a_planted_error_is_told(planted):
    report, done = run(planted)
    failure = failure_of(planted, report)
    _told[planted.name] = failure is None
    assert failure is None, done.stderr[-1500:]


def test_how_many_are_told():
    """Printed for who looks at the output: planted, and written after the rules were."""
    for label, programs in (("planted", PLANTED), ("held out", HELD_OUT)):
        ran = [_told[one.name] for one in programs if one.name in _told]
        print(f"{label}: {sum(ran)} of {len(ran)} that ran explained, of {len(programs)}")
    assert len(PLANTED) >= 30
    assert len(HELD_OUT) >= 10
    assert len({one.cause for one in PLANTED}) == 11
