"""`tenure demo`: what it prints, the files that it leaves, and the docs that show it.

The programs that it shows are private; their source is compared with what is shown.
"""

import inspect
import itertools
import re
import textwrap
from pathlib import Path

import pytest

from tenure._demo import _chapters, _programs
from tenure.profiler import Recording
from tests.programs import IMPORTED, run_program, run_python

_ROOT = Path(__file__).parents[2]
_SIZE = r"([\d.]+ (?:B|[KMGT]iB))"


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What the quick demo prints to a file; it leaves its files in a folder of this test."""
    folder = str(tmp_path_factory.mktemp("demo"))
    done = run_program(
        "-m", "tenure", "demo", "--quick", imported=IMPORTED, hides=True, TMPDIR=folder
    )
    assert (done.stderr, done.returncode) == ("", 0)
    return done.stdout


def _chapter(told, number):
    return re.split(r"^(?=Chapter \d)", told, flags=re.MULTILINE)[number]


def _words(text):
    return " ".join(text.split())


def _bytes(text):
    value, unit = text.split()
    return float(value) * 1024 ** ("B", "KiB", "MiB", "GiB", "TiB").index(unit)


def test_it_begins_before_torch_is_imported():
    code = "import sys, tenure._demo; sys.exit('torch' in sys.modules)"
    assert run_python("-c", code).returncode == 0


@pytest.mark.slow
def test_the_code_that_is_shown_is_the_code_that_runs(told):
    for name in ("train", "train_plain", "train_with_retry", "train_fitted", "run_paged"):
        function = getattr(_programs, name)
        shown = textwrap.indent(_chapters.body_of(function), "    ")
        assert '"""' not in shown
        assert shown in inspect.getsource(function)
        assert shown in told, name


@pytest.mark.slow
def test_a_leak_grows_without_scopes_and_is_named(told):
    chapter = _chapter(told, 1)
    rows = re.findall(rf"^ +\d+ +{_SIZE} +{_SIZE}$", chapter, flags=re.MULTILINE)
    assert len(rows) == 6
    plain, scoped = zip(*rows, strict=True)
    assert all(b > a for a, b in itertools.pairwise(map(_bytes, plain)))
    assert len(set(scoped)) == 1
    words = _words(chapter)
    assert "are the same to the last bit" in words
    assert "item() got float32[] on cpu, 4 B, disposed when <DisposeScope 'step'>" in words
    assert "held by the graph of train.<locals>.history[3]" in words


@pytest.mark.slow
def test_a_batch_that_fails_twice_fits_with_the_losses_of_the_whole(told):
    words = _words(_chapter(told, 2))
    predicted, measured = re.search(rf"batch: {_SIZE}\. Measured: {_SIZE}\.", words).groups()
    assert predicted == measured
    assert words.count("It fails: cpu out of memory. Tried") == 2
    shrunk = r"at micro-batch \d+ \(needed .+? more\); begins again with \d+, and may grow from"
    assert re.search(shrunk, words)
    limit, used = re.search(rf"there are {_SIZE}\..* steps within {_SIZE}\.", words).groups()
    assert _bytes(used) <= _bytes(limit)
    assert float(re.search(r"differ by (\S+) at most", words)[1]) < 1e-5


@pytest.mark.slow
def test_weights_larger_than_their_memory_give_the_same_loss(told):
    words = _words(_chapter(told, 3))
    weights, budget = re.search(rf"weights take {_SIZE}; there are {_SIZE}", words).groups()
    stays, room = re.search(rf"Measured: {_SIZE} stay, {_SIZE} are room", words).groups()
    assert _bytes(stays) + _bytes(room) <= _bytes(budget) + 103 < _bytes(weights)
    assert "The loss is the same as" in words


@pytest.mark.slow
def test_the_files_that_it_names_are_there_and_can_be_read(told):
    folder = Path(re.search(r"^  cd (.+)$", told, re.MULTILINE)[1])
    assert {path.name for path in folder.iterdir()} == {"train.py", "train.tenure", "train.html"}
    assert "losses grew by" in str(Recording.load(folder / "train.tenure").leaks_found())
    assert "<svg" in folder.joinpath("train.html").read_text("utf-8")


@pytest.mark.slow
@pytest.mark.skipif(not (_ROOT / "docs").exists(), reason="runs where the docs are")
def test_the_docs_show_what_the_demo_prints(told):
    """Whatever the numbers, which a larger model or another machine changes."""

    def outline(text):
        # as many rows as steps
        text = re.sub(r"^ +\d+ .*\n", "", text, flags=re.MULTILINE)
        text = re.sub(r"\S*tenure-demo-\S+", "FOLDER", text)
        return re.sub(r"[\d][\d,.]*(e-\d+)?(\+\w+)?( [KMG]?i?B\b)?", "#", _words(text))

    demo = (_ROOT / "docs" / "demo.md").read_text("utf-8")
    (shown,) = re.findall(r"```text\n(Chapter \d.*?)```", demo, re.DOTALL)
    assert outline(shown) == outline(_chapter(told, 4))
    for name in ("README.md", "docs/command-line.md"):
        page = (_ROOT / name).read_text("utf-8")
        (shown,) = re.findall(r"^train\.<locals>.losses .*\nWrote .*$", page, re.MULTILINE)
        assert _words(shown) in _words(demo)
