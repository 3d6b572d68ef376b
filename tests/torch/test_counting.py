"""If counts don't tell who holds a tensor, importing tenure raises an error."""

import subprocess
import sys

import pytest

from tenure._torch import counting

REFUSED = (
    r"^tenure can't be used with torch \S+ on Python 3\.\S+: reference counts don't say what else "
    r"holds a tensor, so a scope could free gradients that are in use\. Use torch 2\.10 or later "
    r"on a Python with the GIL \(docs/install\.md lists tested versions\)\.$"
)


def test_a_torch_whose_gradients_count_as_new_tensors_is_refused(monkeypatch):
    monkeypatch.setattr(counting, "OF_CPP", 0)
    with pytest.raises(ImportError, match=REFUSED):
        counting.require()


def test_a_python_without_the_gil_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    with pytest.raises(ImportError, match=REFUSED):
        counting.require()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DisposeScope", "adaptive", "paging", "profiler", "testing"])
def test_the_first_name_of_tenure_is_refused(name):
    code = f"import sys; sys.getrefcount = lambda _: 2; from tenure import {name}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: tenure can't be used with torch ")


@pytest.mark.slow
def test_the_command_line_refuses_it_in_one_line(tmp_path):
    file = tmp_path / "report.json"
    file.write_text("{}")
    code = (
        "import sys; sys.getrefcount = lambda _: 2; from tenure._cli import main; "
        f"sys.exit(main(['report', {str(file)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert line.startswith("tenure report: error: tenure can't be used with torch ")
    assert done.returncode == 2
