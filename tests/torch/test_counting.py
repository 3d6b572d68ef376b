"""If counts don't tell who holds a tensor, importing tenure raises an error."""

import re

import pytest

from tests.programs import run_program

REFUSED = (
    r"tenure can't be used with torch \S+ on Python 3\.\S+: reference counts don't say what else "
    r"holds a tensor, so a scope could free gradients that are in use\. Use torch 2\.10 or later "
    r"on a Python with the GIL \(docs/install\.md lists tested versions\)\."
)
# as if gradients counted as new tensors, and as if there were no GIL
COUNTS, GIL = "sys.getrefcount = lambda _: 2", "sys._is_gil_enabled = lambda: False"


def ended(code, *arguments):
    return run_program(code, *arguments, has_tenure=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoiled", "name"),
    [
        *((COUNTS, name) for name in ("DisposeScope", "adaptive", "paging", "profiler", "testing")),
        (GIL, "DisposeScope"),
    ],
)
def test_the_first_name_of_tenure_is_refused(spoiled, name):
    done = ended(f"import sys; {spoiled}; from tenure import {name}")
    assert done.returncode == 1
    assert re.fullmatch(f"ImportError: {REFUSED}", done.stderr.splitlines()[-1])


@pytest.mark.slow
def test_the_command_line_refuses_it_in_one_line(tmp_path):
    file = tmp_path / "report.json"
    file.write_text("{}")
    code = f"import runpy, sys; {COUNTS}; runpy.run_module('tenure', run_name='__main__')"
    done = ended(code, "report", str(file))
    (line,) = done.stderr.splitlines()
    assert line.startswith("tenure report: error: tenure can't be used with torch ")
    assert done.returncode == 2
