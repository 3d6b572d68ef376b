import os
import subprocess
import sys
from pathlib import Path

import pytest

_EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
# as long as it takes to see that they run
_ARGUMENTS = {"lightning_digits": ["1"], "trainer": ["--steps", "4", "--length", "32"]}
_ON_RANKS = {"ddp_adaptive": ["-m", "torch.distributed.run", "--nproc-per-node", "2"]}


def test_there_are_examples():
    assert len(_EXAMPLES) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("path", _EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_tells_what_it_found(path):
    done = subprocess.run(
        [sys.executable, *_ON_RANKS.get(path.stem, []), str(path), *_ARGUMENTS.get(path.stem, [])],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        # torchrun says that it sets it
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
