"""``%%tenure``, run by a real InteractiveShell."""

import re
import sys

import pytest
from IPython.core.error import UsageError
from IPython.utils.capture import capture_output

from tenure.profiler import Recording
from tests.shells import fixture_of_shell, in_both, ran

WORK = "import torch\ndef work():\n    a = torch.ones(1000, 1000)\n    return (a * 2).sum()"


shell = fixture_of_shell(WORK)


def shown(captured):
    """What was displayed: as text and as HTML."""
    (found,) = [each.data for each in captured.outputs]
    return found["text/plain"], found["text/html"]


def section(text, title):
    (found,) = [part for part in text.split("\n\n") if part.startswith(title)]
    return found.splitlines()


@in_both
def test_a_cell_shows_its_peak_the_lines_that_made_it_and_what_it_left(shell):
    captured = ran(shell, "%%tenure\ntorch.ones(1)\nkept = torch.ones(500, 1000)\ntotal = work()")
    text, html = shown(captured)
    assert text.startswith("%%tenure\ncame to its end\nafter ")
    assert section(text, "At most")[-1] == "cpu     9.5 MiB"
    lines = [line.split("%  ")[1] for line in section(text, "cpu, at its peak")[1:]]
    assert lines[:4] == [
        "Cell In[3], line 4",
        " Cell In[2], line 3 in work",
        " Cell In[2], line 4 in work",
        "Cell In[3], line 3",
    ]
    left = section(text, "What the cell left\n+1.9 MiB: ")
    assert any(re.match(r"__main__\.kept +new ", line) for line in left)
    assert not re.search(r"ipykernel|ipython-input|interactiveshell", text + html)
    assert "Cell In[2], line 3 in work" in html
    assert html.startswith("<pre")
    assert shell.user_ns["total"] == 2_000_000


def test_the_value_of_a_cell_is_shown_and_named_as_without_the_magic(shell):
    captured = ran(shell, "%%tenure -q\n40 + 2")
    assert (captured.stdout, captured.outputs) == ("Out[3]: 42\n", [])
    assert shell.user_ns["_"] == 42
    assert ran(shell, "%%tenure -q\n40 + 2;").stdout == ""
    text, _ = shown(ran(shell, "%%tenure --leaks\ntorch.ones(1000)"))
    (row,) = [line for line in section(text, "What the cell left") if "float32[1000]" in line]
    assert re.match(r"__main__\.(_+|_\d+|_oh\[\d+\]|Out\[\d+\]) +new ", row)


def test_a_cell_that_leaves_nothing_says_so_and_what_grows_in_it_is_told(shell):
    text, _ = shown(ran(shell, "%%tenure --leaks\nwork();"))
    assert section(text, "What the cell left") == ["What the cell left", "nothing"]
    assert "at its peak" not in text
    text, _ = shown(
        ran(
            shell,
            "%%tenure --leaks\nmodel, losses = torch.nn.Linear(2, 1), []\n"
            "optimizer = torch.optim.SGD(model.parameters())\n"
            "for _ in range(4):\n    loss = model(torch.ones(8, 2)).mean()\n"
            "    losses.append(loss)\n    loss.backward()\n    optimizer.step()",
        )
    )
    assert section(text, "What grew")[1].startswith("- losses grew by 3 tensors, 12 B")


def test_lines_are_those_of_functions_that_were_there_or_that_the_cell_defines(shell):
    captured = ran(
        shell,
        "%%tenure --lines work --lines Net.forward --lines nosuch\n"
        "class Net:\n    def forward(self):\n        return torch.ones(512)\n"
        "Net().forward()\nwork();",
    )
    text, _ = shown(captured)
    work = "\n".join(section(text, "## work, Cell In[2], line 2, cpu"))
    assert "a = torch.ones(1000, 1000)" in work
    net = "\n".join(section(text, "## Net.forward, Cell In[3], line 3, cpu"))
    assert "2.0 KiB  " in net
    assert "What the cell left" not in text
    assert section(text, "Notes")[1:] == ["- --lines: name 'nosuch' is not defined"]


@pytest.mark.slow
def test_an_error_goes_on_and_what_was_found_is_shown_with_its_cause(shell):
    with capture_output() as captured:
        result = shell.run_cell("%%tenure --on-oom --budget 2MiB\nx = work()", store_history=True)
    assert type(result.error_in_exec).__name__ == "OutOfMemoryError"
    text, _ = shown(captured)
    assert " at Cell In[2], line 3 in work: " in "\n".join(section(text, "Out of memory"))
    # the budget was for the cell
    ran(shell, "y = work()")
    with capture_output() as captured:
        result = shell.run_cell("%%tenure --timeline\nx = torch.ones(256)\nraise ValueError(3)")
    assert type(result.error_in_exec) is ValueError
    text, _ = shown(captured)
    assert text.startswith("%%tenure --timeline\nValueError: 3\nafter ")
    assert "ValueError" in captured.stdout + captured.stderr
    assert sys.gettrace() is None


@pytest.mark.slow
def test_nothing_is_changed_by_the_recording(shell):
    code = "torch.manual_seed(0); {} = (work() + torch.rand(3)).tolist()"
    ran(shell, code.format("plain"))
    ran(shell, f"%%tenure --lines work --leaks --timeline --on-oom\n{code.format('recorded')}")
    assert shell.user_ns["plain"] == shell.user_ns["recorded"]


@pytest.mark.slow
def test_a_recording_is_written_and_never_over_another_unless_told(shell, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    captured = ran(shell, "%%tenure -o 'a cell.tenure' --timeline\nwork();")
    assert captured.stdout == "Wrote a cell.tenure. See it with: !tenure report 'a cell.tenure'\n"
    recording = Recording.load("a cell.tenure")
    assert recording.command == ("%%tenure", "-o", "a cell.tenure", "--timeline")
    assert (recording.ended, recording.exit_code) == ("came to its end", 0)
    assert "Cell In[2], line 3 in work" in str(recording.tree())
    assert refused(shell, "%%tenure -o 'a cell.tenure'\nran = True") == (
        "%%tenure: a cell.tenure is there already, and was left as it is. Overwrite it with -f, or "
        "name another file with -o."
    )
    captured = ran(shell, "%%tenure -q -f -o 'a cell.tenure' --leaks\n1 + 1;")
    assert (captured.stdout, captured.outputs) == ("", [])
    assert Recording.load("a cell.tenure").timeline is None


def refused(shell, code):
    with pytest.raises(UsageError) as caught:
        ran(shell, code)
    assert "ran" not in shell.user_ns
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--nosuch", ": unrecognized arguments: --nosuch. See %%tenure? for what there is."),
        ("-o 'x", ": No closing quotation."),
        ("--lines 'work('", " --lines work(: not a name, such as func or Net.forward."),
    ],
)
def test_nothing_runs_under_options_that_are_wrong(shell, options, told):
    assert refused(shell, f"%%tenure {options}\nran = True").startswith(f"%%tenure{told}")
