import subprocess
import sys
from pathlib import Path

import pytest

_EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
# as long as it takes to see that they run
_ARGUMENTS = {"lightning_digits": ["1"], "trainer": ["--steps", "4", "--length", "32"]}


def test_there_are_examples():
    assert len(_EXAMPLES) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("path", _EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_tells_what_it_found(path):
    done = subprocess.run(
        [sys.executable, str(path), *_ARGUMENTS.get(path.stem, [])],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
