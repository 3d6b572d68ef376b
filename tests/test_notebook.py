import json
import re

import pytest

from .notebook import PAGE, executed

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="runs where the docs are")


def _outline(cell):
    """The lines that a cell shows, whatever the numbers, in any order."""
    text = "\n".join("".join(shown["data"]["text/plain"]) for shown in cell["outputs"])
    text = re.sub(r"torch \d\S+", "torch #", text)
    text = re.sub(r"0x[0-9a-f]+|\d[\d,.]*", "#", text)
    return sorted(" ".join(line.split()) for line in text.splitlines())


def _cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.mark.slow
def test_the_notebook_shows_what_its_cells_show(tmp_path):
    notebook = json.loads(PAGE.read_text("utf-8"))
    shown, done = _cells(notebook), _cells(executed(notebook, tmp_path))
    assert [_outline(cell) for cell in shown] == [_outline(cell) for cell in done]
    assert "history grew by # tensors" in "\n".join(_outline(shown[1]))
    assert "<svg" in (tmp_path / "timeline.html").read_text("utf-8")
