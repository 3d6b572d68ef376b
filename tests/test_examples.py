import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .programs import run_program

_EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
_PAGE = Path(__file__).parent.parent / "docs" / "demo.md"
# as long as it takes to see that they run
_ARGUMENTS = {"lightning_digits": ["1"], "trainer": ["--steps", "4", "--length", "32"]}
_ON_RANKS = {"ddp_adaptive": ["-m", "torch.distributed.run", "--nproc-per-node", "2"]}


@pytest.mark.skipif(not _PAGE.exists(), reason="runs where the docs are")
def test_the_page_lists_each_example():
    listed = re.findall(r"^\| `(\w+\.py)` \|", _PAGE.read_text("utf-8"), re.MULTILINE)
    assert sorted(listed) == [path.name for path in _EXAMPLES]


@pytest.mark.parametrize("path", _EXAMPLES, ids=lambda path: path.stem)
def test_an_example_has_less_than_a_hundred_lines(path):
    assert len(path.read_text("utf-8").splitlines()) < 100


@pytest.mark.slow
@pytest.mark.parametrize("path", _EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_tells_what_it_found(path):
    ranks, arguments = _ON_RANKS.get(path.stem, []), _ARGUMENTS.get(path.stem, [])
    done = _run_alone(*ranks, path, *arguments) if ranks or arguments else run_program(path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def _run_alone(*command):
    return subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        check=False,
        # ranks import torch and dynamo, each by itself, beside other tests
        timeout=300,
        # torchrun says that it sets it
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
