import re
from pathlib import Path

import pytest

from .programs import run_program

_EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
_PAGE = Path(__file__).parent.parent / "docs" / "demo.md"
# as long as it takes to see that they run
_ARGUMENTS = {"lightning_digits": ["1"], "trainer": ["--steps", "4", "--length", "32"]}
_ON_RANKS = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
# what takes longer to import than to use, in one process for all who use any of it
_LIBRARIES = ("accelerate", "lightning.pytorch", "transformers", "transformers.trainer", "peft")
_USE_THEM = ("accelerate_loop", "lightning_digits", "lora_paged", "paged_generation", "trainer")


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
    if path.stem == "ddp_adaptive":
        # each rank imports torch and dynamo by itself; torchrun would say that it sets the variable
        done = run_program(*_ON_RANKS, str(path), OMP_NUM_THREADS="1")
    else:
        uses = path.stem in _USE_THEM
        done = run_program(
            path, *_ARGUMENTS.get(path.stem, []), imported=_LIBRARIES * uses, hides=uses
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
