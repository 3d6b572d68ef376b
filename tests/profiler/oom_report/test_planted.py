"""Programs that run out of memory: the first line names the cause and the remedy.

Each names the culprit as well: a variable, a module, or a line.
"""

import pytest

from . import planted_kept, planted_work  # noqa: F401  # they add their programs to the list
from .held_out import HELD_OUT
from .planted import PLANTED, failure_of, run
from .planted_fresh import FRESH
from .planted_remedies import REMEDIES
from .planted_scripts import SCRIPTS

_MOST_CHARACTERS = 160
_QUICK = ("losses", "outputs on a device", "tensors under a limit of the process")
_told: dict[str, bool] = {}


def _case(one):
    marks = () if one.name in _QUICK else (pytest.mark.slow,)
    return pytest.param(one, id=one.name.replace(" ", "-"), marks=marks)


@pytest.mark.parametrize(
    "planted", [*map(_case, (*PLANTED, *HELD_OUT, *SCRIPTS, *FRESH, *REMEDIES))]
)
def test_the_cause_of_a_planted_error_is_told(planted):
    report, done = run(planted, hides=planted.name not in _QUICK)
    failure = failure_of(planted, report)
    _told[planted.name] = failure is None
    assert failure is None, done.stderr[-1500:]
    assert len(report["first_line"]) <= _MOST_CHARACTERS


def test_how_many_are_told():
    """Printed for who looks at the output: planted, and written after the rules were."""
    lists = {"planted": PLANTED, "held out": HELD_OUT, "scripts": SCRIPTS, "fresh": FRESH}
    lists["remedies"] = REMEDIES
    for label, programs in lists.items():
        ran = [_told[one.name] for one in programs if one.name in _told]
        print(f"{label}: {sum(ran)} of {len(ran)} that ran explained, of {len(programs)}")
    assert len(PLANTED) >= 30
    assert len(HELD_OUT) >= 10
    assert len({one.cause for one in PLANTED}) == 11
