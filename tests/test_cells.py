"""What a line of a notebook is called, wherever something of tenure names one."""

import inspect
import pickle
import re
import sys
import warnings

import pytest

from tests.shells import fixture_of_shell, in_both, opened, ran

IMPORTS = "import torch\nfrom tenure import *\nfrom tenure.profiler import *"


# the next cell is the third
shell = fixture_of_shell(IMPORTS)


def told(shell, code):
    """What a cell prints, which names no file of the notebook's."""
    captured = ran(shell, code)
    text = captured.stdout + captured.stderr
    assert not re.search(r"ipykernel|ipython-input|interactiveshell", text)
    return text


@in_both
def test_an_error_names_the_cells_that_opened_the_scope_and_made_the_tensor(shell):
    text = told(
        shell,
        "with NewDisposeScope('step', capture='site'):\n"
        "    y = torch.ones(3)\n"
        "try:\n    y + 1\nexcept TenureError as error:\n    print(error)",
    )
    assert "(opened at Cell In[3], line 1)" in text
    assert "created at Cell In[3], line 2." in text


def test_every_report_says_the_cell(shell, caplog):
    told(
        shell,
        "def make():\n    return torch.ones(3)\n"
        "with NewDisposeScope('step', capture='stack', policy='report') as scope:\n    y = make()",
    )
    assert "created at Cell In[3], line 2 < Cell In[3], line 4\n" in caplog.text
    code = "print([r.created_at for r in snapshot().records if r.name == '__main__.z'])"
    ran(
        shell, "with NewDisposeScope(capture='site') as scope:\n    z = scope.detach(torch.ones(3))"
    )
    assert told(shell, code) == "['Cell In[4], line 2']\n"
    text = told(
        shell,
        "with LineProfiler(make, device='cpu') as profiler: make()\nprint(profiler.display())",
    )
    assert re.match(r"## make, Cell In\[3\], line \d, cpu\n", text)
    assert "return torch.ones(3)" in text
    ran(shell, "from tenure.adaptive import predict_peak\nm = torch.nn.Linear(3, 3)")
    text = told(shell, "print(predict_peak(lambda b: m(b).sum(), torch.ones(4, 3)))")
    assert "(Cell In[8], line 1)" in " ".join(text.split())


@in_both
def test_a_timeline_begins_with_the_cell_and_exports_its_lines(shell, tmp_path):
    ran(shell, "def make():\n    return torch.ones(1000)")
    ran(shell, "with Timeline() as timeline:\n    a = make()\n    b = torch.ones(2000)")
    report = shell.user_ns["timeline"].report
    stacks = {row.n_bytes: row.stack for row in report.devices[0].at_peak}
    assert stacks[4000] == ("Cell In[4], line 2", "Cell In[3], line 2 in make")
    assert stacks[8000] == ("Cell In[4], line 3",)
    report.export(tmp_path / "told.pickle")
    traces = pickle.loads((tmp_path / "told.pickle").read_bytes())["device_traces"]
    frames = [frame for trace in traces for event in trace for frame in event["frames"]]
    assert {"filename": "Cell In[3]", "line": 2, "name": "make"} in frames
    assert {"filename": "Cell In[4]", "line": 3, "name": "<module>"} in frames


@in_both
def test_a_line_of_a_cell_counts_as_it_is_seen_with_the_magic_above_it(shell):
    captured = ran(
        shell,
        "%%mlrun -f work -d cpu\n\nimport torch\ndef work():\n    return torch.ones(3)\nwork();",
    )
    (output,) = captured.outputs[-1:]
    assert output.data["text/plain"].startswith("## work, Cell In[3], line 4, cpu\n")
    with pytest.raises(ValueError, match="wrong") as caught:
        ran(shell, "%%mlrun -q -f work -d cpu first = 1\n\nraise ValueError('wrong')")
    assert caught.traceback[-1].lineno + 1 == 3


def known(shell):
    return {kind: dict(shell.magics_manager.magics[kind]) for kind in ("line", "cell")}


def test_loading_prints_nothing_and_unloading_leaves_the_shell_as_it_was():
    with opened() as shell:
        ran(shell, "%unload_ext tenure")
        before = known(shell), {name: list(each) for name, each in shell.events.callbacks.items()}
        assert {"mlrun", "tenure"}.isdisjoint({**before[0]["line"], **before[0]["cell"]})
        hooks = sys.displayhook, sys.excepthook, sys.gettrace(), warnings.showwarning
        for code in ("%load_ext tenure", "%reload_ext tenure"):
            captured = ran(shell, code)
            assert (captured.stdout, captured.stderr) == ("", "")
        assert "mlrun" in known(shell)["cell"]
        # from Python 3.13 on it has no indentation
        words = inspect.cleandoc(shell.find_cell_magic("tenure").__doc__)
        for flag in ("--leaks", "--timeline", "--on-oom", "--lines", "--budget", "-o", "-f", "-q"):
            assert f"\n{flag}" in words
        ran(shell, "%unload_ext tenure")
        after = known(shell), {name: list(each) for name, each in shell.events.callbacks.items()}
        assert after == before
        assert hooks == (sys.displayhook, sys.excepthook, sys.gettrace(), warnings.showwarning)
