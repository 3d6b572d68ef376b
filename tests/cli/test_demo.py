import inspect
import itertools
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
import torch

from tenure._cli import main
from tenure._demo import QUICK, _chapters, _programs, _subject
from tenure._demo._screen import body_of
from tenure._demo._subject import draw_windows, read_corpus
from tenure._errors import CommandError
from tenure.profiler import Recording


def _demo(folder):
    """Run the quick demo as a user does whose output goes to a file; it leaves files in folder."""
    plain = {"FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS"}
    environment = {name: value for name, value in os.environ.items() if name not in plain}
    environment["TMPDIR"] = str(folder)
    return subprocess.run(
        [sys.executable, "-m", "tenure", "demo", "--quick"],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    return _demo(tmp_path_factory.mktemp("demo"))


def _chapter(done, number):
    return re.split(r"^(?=Chapter \d)", done.stdout, flags=re.MULTILINE)[number]


def _words(text):
    return " ".join(text.split())


def _rows(chapter):
    """The rows of numbers of the chapter's table."""
    lines = re.findall(r"^ +\d+(?: +[\d.]+){2}$", chapter, re.MULTILINE)
    return [line.split() for line in lines]


def _bytes(text):
    value, unit = text.split()
    return float(value) * 1024 ** ("B", "KiB", "MiB", "GiB", "TiB").index(unit)


_SIZE = r"([\d.]+ (?:B|[KMGT]iB))"


def test_nothing_goes_to_stderr_and_no_control_characters_to_a_pipe(done):
    assert done.stderr == ""
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", done.stdout)


def test_no_line_is_longer_than_a_terminal(done):
    folder = re.escape(tempfile.gettempdir())
    lines = [line for line in done.stdout.splitlines() if not re.match(r"  cd ", line)]
    assert [line for line in lines if len(line) > 80 and not re.search(folder, line)] == []


def test_each_chapter_says_which_it_is_and_how_long_it_takes(done):
    titles = re.findall(
        r"^Chapter (\d) of (\d): .* \(about \d+ s left\)$", done.stdout, re.MULTILINE
    )
    assert [int(number) for number, _ in titles] == list(range(1, len(titles) + 1))
    assert {int(of) for _, of in titles} == {len(titles)} == {len(_chapters._CHAPTERS)}
    assert sum(chapter.share for chapter in _chapters._CHAPTERS) == pytest.approx(1)


def test_it_begins_before_torch_is_imported():
    code = "import sys, tenure._demo; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "function",
    [
        _programs.train,
        _programs.open_reporting,
        _programs.train_plain,
        _programs.train_with_retry,
        _programs.train_fitted,
        _programs.run_paged,
        _programs.train_paged,
    ],
    ids=lambda function: function.__name__,
)
def test_the_code_that_is_shown_is_the_code_that_runs(done, function):
    source = inspect.getsource(function)
    shown = body_of(function)
    assert '"""' not in shown
    assert textwrap.indent(shown, "    ") in source
    assert textwrap.indent(shown, "    ") in done.stdout


def test_live_bytes_grow_without_scopes_and_stay_flat_with_them(done):
    rows = re.findall(rf"^ +\d+ +{_SIZE} +{_SIZE}$", _chapter(done, 1), flags=re.MULTILINE)
    assert len(rows) == QUICK.steps
    plain, scoped = zip(*rows, strict=True)
    grown = [_bytes(text) for text in plain]
    assert all(later > earlier for earlier, later in itertools.pairwise(grown))
    assert grown[-1] > 3 * grown[0]
    assert len(set(scoped)) == 1


def test_scopes_leave_the_losses_as_they_are_and_the_loss_goes_down(done):
    told = (
        r"The losses of the two runs are the same to the last bit \((.+) at first, (.+) at the end"
    )
    first, last = re.search(told, _words(_chapter(done, 1))).groups()
    assert float(last) < float(first) - 0.2


def test_reading_a_loss_that_was_let_go_is_refused(done):
    told = "DisposedTensorError: item() got float32[] on cpu, 4 B, disposed when <DisposeScope"
    assert told in _words(_chapter(done, 1))


def test_the_report_names_the_list_that_holds_the_leak_and_sums_up_its_graph(done):
    told = _chapter(done, 2)
    assert "<DisposeScope 'step 4'>: " in told
    assert "\n  float32[] on cpu, 4 B, created at" in told
    assert "\n    held by train.<locals>.history[3]" in told
    assert re.search(r"\n  \d+ tensors that autograd saved, [\d.]+ [KM]iB\n", told)
    assert "\n    held by the graph of train.<locals>.history[3]" in told


def test_the_forecast_is_what_was_measured(done):
    told = rf"before it ran: {_SIZE} beside .*? Measured: {_SIZE}\."
    forecast, measured = re.search(told, _words(_chapter(done, 3))).groups()
    assert forecast == measured


def test_plain_training_fails_in_too_little_memory_and_so_does_its_retry(done):
    assert len(re.findall(r"It fails: cpu out of memory\. Tried", _chapter(done, 3))) == 2


def test_the_sizes_that_were_tried_are_printed(done):
    told = (
        r"'loss' ran out of \w+(?::#)? memory at micro-batch \d+ \(.+? more\); goes on with \d+\."
    )
    assert re.search(told, _words(_chapter(done, 3)))


def test_split_training_has_the_loss_curve_of_the_unsplit_run_within_the_budget(done):
    chapter = _chapter(done, 3)
    rows = [[float(cell) for cell in cells[1:]] for cells in _rows(chapter)]
    assert len(rows) == QUICK.steps
    assert all(abs(whole - split) < 2e-4 for whole, split in rows)
    told = rf"there are {_SIZE}\..* steps within {_SIZE},.* at the most: rounding"
    budget, used = re.search(told, _words(chapter)).groups()
    assert _bytes(used) <= _bytes(budget)


def test_weights_larger_than_their_memory_take_what_was_planned_and_give_the_same_loss(done):
    chapter = _chapter(done, 4)
    weights, budget = re.search(rf"weights take {_SIZE}; there are {_SIZE}", chapter).groups()
    assert _bytes(budget) < 0.6 * _bytes(weights)
    kinds = r"stays in memory|room to pass through|read in each pass"
    rows = re.findall(rf"^  ({kinds}) +{_SIZE} +{_SIZE}$", chapter, re.MULTILINE)
    assert len(rows) == 3
    assert all(planned == measured for _, planned, measured in rows)
    stays, room = (_bytes(measured) for _, _, measured in rows[:2])
    assert stays + room <= _bytes(budget) + 103  # what rounding hides
    assert "The loss is the same as" in chapter


def test_a_step_that_fits_neither_way_has_the_gradients_of_the_whole(done):
    chapter = _words(_chapter(done, 5))
    assert "Plain PyTorch: sim:0 out of memory. With tenure:" in chapter
    assert re.search(r"goes on with \d+\.", chapter)
    one, other = re.search(r"a loss of ([\d.]+); of the whole it is ([\d.]+),", chapter).groups()
    assert one == other
    apart = re.search(r"the gradients differ by (\S+) at the most", chapter)[1]
    assert float(apart) < 1e-10


def test_the_files_that_it_names_are_there_and_can_be_read(done):
    chapter = _chapter(done, len(_chapters._CHAPTERS))
    assert re.search(r"train\.<locals>\.losses grew by \d+ tensors", _words(chapter))
    folder = Path(re.search(r"^  cd (.+)$", chapter, re.MULTILINE)[1])
    assert {path.name for path in folder.iterdir()} == {"train.py", "train.tenure", "train.html"}
    assert "losses grew by" in str(Recording.load(folder / "train.tenure").leaks_found())
    assert "<svg" in folder.joinpath("train.html").read_text("utf-8")


def test_steps_and_seed_are_used(monkeypatch, capsys):
    (chapter,) = [each for each in _chapters._CHAPTERS if each.tell is _chapters.fit_the_batch]
    monkeypatch.setattr(_chapters, "_CHAPTERS", (chapter,))
    assert main(["demo", "--quick", "--steps", "3", "--seed", "7"]) == 0
    other = capsys.readouterr().out
    assert "seed 7." in other
    assert [cells[0] for cells in _rows(other)] == ["1", "2", "3"]


def _outline(text):
    """What is said, whatever the numbers: those that a larger model or another machine changes."""
    text = re.sub(r"^ +\d+( +[\d.]+( [KMG]?i?B)?){2}\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"\S*tenure-demo-\S+", "FOLDER", text)
    text = re.sub(r"-?\d[\d,.]*(e-\d+)?(\+\w+)?( [KMG]?i?B\b)?", "#", _words(text))
    decision = r"at micro-batch # \(needed # more\); goes on with #\.? ?"
    event = rf"'loss' ran out of \w+(?::#)? memory {decision}"
    text = re.sub(rf"({event})+", "EVENTS ", text.replace("#.", "#"))
    # how the name of a file is broken depends on the numbers beside it
    return re.sub(r" ?\S*_(subject|programs)\.py:#", " SITE", text).split()


@pytest.mark.parametrize("name", ["README.md", "docs/command-line.md"])
def test_what_other_pages_show_of_its_last_program_is_what_the_demo_has(name):
    root = Path(__file__).parents[2]
    if not (root / "docs").exists():
        pytest.skip("runs where the docs are")
    demo = " ".join((root / "docs" / "demo.md").read_text("utf-8").split())
    (shown,) = re.findall(
        r"^train\.<locals>.losses .*\nWrote .*$", (root / name).read_text("utf-8"), re.MULTILINE
    )
    assert " ".join(shown.split()) in demo


def test_the_docs_show_what_the_demo_prints(done):
    page = Path(__file__).parents[2].joinpath("docs", "demo.md")
    if not page.exists():
        pytest.skip("runs where the docs are")
    shown = next(
        b for b in page.read_text("utf-8").split("```") if b.startswith("text\ntenure says")
    )
    assert _outline(shown.removeprefix("text\n")) == _outline(done.stdout)


class TestText:
    def test_is_the_source_of_the_standard_library(self):
        corpus = read_corpus(5000)
        text = "".join(corpus.vocabulary[token] for token in corpus.training)
        assert text.startswith('"""Record of phased-in incompatible language changes.')
        assert (len(corpus.training), len(corpus.validation)) == (4500, 500)

    def test_windows_are_followed_by_their_next_characters(self):
        tokens = torch.arange(50)
        windows, following = draw_windows(tokens, 8, 5, torch.Generator().manual_seed(0))
        assert windows.shape == following.shape == (8, 5)
        assert torch.equal(following, windows + 1)

    def test_a_python_without_source_is_an_error_of_one_line(self, monkeypatch, tmp_path):
        monkeypatch.setattr(_subject.sysconfig, "get_path", lambda name: str(tmp_path))
        with pytest.raises(
            CommandError,
            match=r"holds too little source to learn from \(10 characters short\)\. Use a Python",
        ):
            read_corpus(10)
