"""If counts don't tell who holds a tensor, importing tenure raises an error."""

import json
import re

import pytest

from tests.programs import run_program

REFUSED = (
    r"tenure can't be used with torch \S+ on Python 3\.\S+: reference counts don't say what else "
    r"holds a tensor, so a scope could free gradients that are in use\. Use torch 2\.10 or later "
    r"on a Python with the GIL \(docs/versions\.md lists tested versions\)\."
)
# as if gradients counted as new tensors, and as if there were no GIL
COUNTS, GIL = "sys.getrefcount = lambda _: 2", "sys._is_gil_enabled = lambda: False"
PROGRAM = """
import json, runpy, sys, tenure
{}
refused = []
for name in ("DisposeScope", "adaptive", "paging", "profiler", "testing"):
    try:
        getattr(tenure, name)
    except ImportError as error:
        refused.append(str(error))
print(json.dumps(refused), flush=True)
sys.argv = ["tenure", "report", sys.argv[1]]
runpy.run_module("tenure", run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize("spoiled", [COUNTS, GIL])
def test_each_name_of_tenure_is_refused_and_the_command_line_says_so_in_one_line(spoiled, tmp_path):
    file = tmp_path / "report.json"
    file.write_text("{}")
    done = run_program(PROGRAM.format(spoiled), str(file), has_tenure=False)
    refused = json.loads(done.stdout)
    assert len(refused) == 5
    assert all(re.fullmatch(REFUSED, error) for error in refused)
    (line,) = done.stderr.splitlines()
    assert line.startswith("tenure report: error: tenure can't be used with torch ")
    assert done.returncode == 2
