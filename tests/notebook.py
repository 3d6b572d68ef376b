"""The notebook of the docs, run cell by cell; ``python -m tests.notebook`` writes its outputs."""

import copy
import json
import tempfile
from contextlib import chdir
from pathlib import Path

from tests.shells import opened, ran

PAGE = Path(__file__).parent.parent / "docs" / "notebook.ipynb"


def executed(notebook, folder):
    """Return the notebook with the outputs that its cells have in that folder.

    Jupyter is not needed: a shell of IPython runs the cells, and names them as a kernel does.
    """
    done = copy.deepcopy(notebook)
    cells = [cell for cell in done["cells"] if cell["cell_type"] == "code"]
    with chdir(folder), opened(of_notebook=True, extension=False) as shell:
        for number, cell in enumerate(cells, start=1):
            captured = ran(shell, "".join(cell["source"]))
            cell["execution_count"] = number
            cell["outputs"] = [_display(shown.data) for shown in captured.outputs]
            assert not captured.stdout, captured.stdout
    return done


def _display(data):
    lines = {kind: text.splitlines(keepends=True) for kind, text in data.items()}
    return {"output_type": "display_data", "metadata": {}, "data": lines}


def main():
    """Write the outputs of each cell into the notebook."""
    notebook = json.loads(PAGE.read_text("utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        done = executed(notebook, folder)
    PAGE.write_text(json.dumps(done, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
