import subprocess
import sys

import pytest

import tenure
from tenure.paging import PagingError
from tests.programs import main


def _refused(arguments, capsys):
    """The exit code and the only line of a call that argparse refuses."""
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    return exit_.value.code, printed.err


def test_help_lists_the_verbs_and_that_of_a_verb_is_its_docstring(capsys):
    assert main([]) == 0
    printed = capsys.readouterr()
    words = " ".join(printed.out.split())
    assert words.startswith("usage: tenure ")
    assert "demo Show in about a minute how tenure names a leak, fits a batch, and" in words
    assert printed.err == ""
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["demo", "--help"])
    text = capsys.readouterr().out
    assert text.startswith("usage: tenure demo [-h] [--quick]\n")
    assert "The demo needs\nno network connection and no accelerator." in text


def test_help_and_version_import_neither_torch_nor_rich():
    program = """
import contextlib, runpy, sys
for words in ("--version", "--help", "demo --help", "run --help"):
    sys.argv[1:] = words.split()
    with contextlib.suppress(SystemExit):
        runpy.run_module("tenure", run_name="__main__")
        print("it did not end")
print({"torch", "rich", "numpy", "psutil", "tenure._cli._program"} & set(sys.modules))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"tenure {tenure.__version__}\nusage: tenure ")
    assert done.stdout.endswith("\nset()\n")
    assert "it did not end" not in done.stdout


def test_an_unknown_verb_or_option_is_refused_in_one_line_that_says_what_there_is(capsys):
    code, line = _refused(["dmeo"], capsys)
    assert code == 2
    assert line.startswith("tenure: error: argument VERB: invalid choice: 'dmeo' (choose from ")
    assert "demo" in line
    assert line.endswith("). See tenure --help.\n")
    assert _refused(["run", "--timline", "train.py"], capsys) == (
        2,
        "tenure run: error: unrecognized arguments: --timline. See tenure run --help.\n",
    )


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--batch", "0"], "argument --batch: '0' is no whole number of at least 1"),
        (["--batch", "1.5"], "argument --batch: '1.5' is no whole number of at least 1"),
        (["--images", "x"], "argument --images: 'x' is no whole number of at least 0"),
        (["--batch"], "argument --batch: expected one argument"),
        (["--images", str(2**64)], f"argument --images: '{2**64}' is above {2**64 - 1}"),
    ],
)
def test_a_bad_number_is_refused_in_one_line(arguments, complaint, capsys):
    assert _refused(["fit", "llama", *arguments], capsys) == (
        2,
        f"tenure fit: error: {complaint}. See tenure fit --help.\n",
    )


def _make_demo_raise(monkeypatch, error):
    def run(**settings):
        raise error

    monkeypatch.setattr("tenure._demo.tell", run)


@pytest.mark.parametrize("asked", ["", "1"])
def test_an_error_of_tenure_is_one_line_and_shows_where_it_was_raised_when_asked_to(
    asked, monkeypatch, capsys
):
    monkeypatch.setenv("TENURE_TRACEBACK", asked)
    error = PagingError("No budget of 3 B does.\n  The least is 4 B.")
    _make_demo_raise(monkeypatch, error)
    assert main(["demo"]) == 2
    told, line = (
        capsys.readouterr().err,
        "tenure demo: error: No budget of 3 B does. The least is 4 B.",
    )
    if not asked:
        assert told == f"{line} (PagingError; TENURE_TRACEBACK=1 shows where.)\n"
        return
    assert told.startswith("Traceback (most recent call last):\n")
    assert "raise error" in told
    assert told.endswith(f"\n{line}\n")


def test_an_error_of_someone_else_keeps_its_traceback_and_control_c_has_none(monkeypatch, capsys):
    _make_demo_raise(monkeypatch, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        main(["demo"])
    _make_demo_raise(monkeypatch, KeyboardInterrupt())
    assert main(["demo"]) == 130
    assert capsys.readouterr().err == "tenure: interrupted\n"
