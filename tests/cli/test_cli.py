import pytest

import tenure
from tenure.paging import PagingError
from tests.programs import main, run_python


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
    done = run_python("-c", program)
    assert done.stdout.startswith(f"tenure {tenure.__version__}\nusage: tenure ")
    assert done.stdout.endswith("\nset()\n")
    assert "it did not end" not in done.stdout


_NOT_WHOLE = "is no whole number of at least"


@pytest.mark.parametrize(
    ("verb", "arguments", "complaint"),
    [
        ("", "dmeo", "argument VERB: invalid choice: 'dmeo' (choose from "),
        ("run", "--timline train.py", "unrecognized arguments: --timline. See tenure run --help."),
        ("run", "--budget 8 x.py", "argument --budget: '8' is 8 bytes; write"),
        ("fit", "llama --batch 0", f"argument --batch: '0' {_NOT_WHOLE} 1. See tenure fit --help."),
        ("fit", "llama --batch 1.5", f"argument --batch: '1.5' {_NOT_WHOLE} 1. See"),
        ("fit", "llama --images x", f"argument --images: 'x' {_NOT_WHOLE} 0. See"),
        ("fit", "llama --batch", "argument --batch: expected one argument. See"),
        ("fit", f"llama --images {2**64}", f"argument --images: '{2**64}' is above {2**64 - 1}. "),
    ],
)
def test_what_argparse_refuses_is_told_in_one_line_that_says_what_there_is(
    verb, arguments, complaint, capsys
):
    with pytest.raises(SystemExit, match=r"^2$"):
        main([*verb.split(), *arguments.split()])
    printed, command = capsys.readouterr(), f"tenure {verb}".rstrip()
    assert printed.err.startswith(f"{command}: error: {complaint}")
    assert printed.err.endswith(f" See {command} --help.\n")
    assert verb or "demo" in printed.err
    assert (printed.out, printed.err.count("\n")) == ("", 1)


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
