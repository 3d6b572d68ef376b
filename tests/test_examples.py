import json
import re
from pathlib import Path

import pytest

from .notebook import PAGE as NOTEBOOK
from .notebook import executed
from .programs import run_program

_EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
_PAGE = Path(__file__).parent.parent / "docs" / "demo.md"
# as long as it takes to see that they run
_ARGUMENTS = {"lightning_digits": ["1"], "trainer": ["--steps", "4", "--length", "32"]}
# what takes longer to import than to use, in one process for all
_LIBRARIES = (
    *("torch._dynamo", "accelerate", "lightning.pytorch", "transformers", "transformers.trainer"),
    *("peft", "sklearn.datasets"),
)
# as torchrun does, with what is imported already
_ON_TWO_RANKS = """
import os, runpy, socket, sys
with socket.create_server(("localhost", 0)) as free:
    port = str(free.getsockname()[1])
os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=port, WORLD_SIZE="2", OMP_NUM_THREADS="1")
pids = []
for rank in "01":
    if not (pid := os.fork()):
        os.environ["RANK"] = rank
        runpy.run_path(sys.argv[1], run_name="__main__")
    pids.append(pid)
sys.exit(any(os.waitpid(pid, 0)[1] for pid in pids))
"""


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
    words = [_ON_TWO_RANKS, str(path)] if path.stem == "ddp_adaptive" else [path]
    done = run_program(*words, *_ARGUMENTS.get(path.stem, []), imported=_LIBRARIES, hides=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def _outline(cell):
    """The lines that a cell shows, whatever the numbers, in any order."""
    text = "\n".join("".join(shown["data"]["text/plain"]) for shown in cell["outputs"])
    text = re.sub(r"torch \d\S+", "torch #", text)
    text = re.sub(r"0x[0-9a-f]+|\d[\d,.]*", "#", text)
    return sorted(" ".join(line.split()) for line in text.splitlines())


def _cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.mark.slow
@pytest.mark.skipif(not NOTEBOOK.exists(), reason="runs where the docs are")
def test_the_notebook_shows_what_its_cells_show(tmp_path):
    notebook = json.loads(NOTEBOOK.read_text("utf-8"))
    shown, done = _cells(notebook), _cells(executed(notebook, tmp_path))
    assert [_outline(cell) for cell in shown] == [_outline(cell) for cell in done]
    assert "history grew by # tensors" in "\n".join(_outline(shown[1]))
    assert "<svg" in (tmp_path / "timeline.html").read_text("utf-8")
