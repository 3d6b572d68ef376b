import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tenure._demo import _subject
from tenure._demo._subject import QUICK, draw_windows, read_corpus
from tenure._errors import CommandError


def _demo(*arguments):
    """Run the quick demo as a user does whose output goes to a file."""
    plain = {"FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS"}
    environment = {name: value for name, value in os.environ.items() if name not in plain}
    return subprocess.run(
        [sys.executable, "-m", "tenure", "demo", "--quick", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )


@pytest.fixture(scope="module")
def done():
    return _demo()


def _chapter(done, number):
    return re.split(r"^(?=\d\. )", done.stdout, flags=re.MULTILINE)[number]


def _rows(chapter):
    """The rows of numbers of the chapter's table."""
    lines = (line.split() for line in chapter.splitlines())
    return [cells for cells in lines if cells and cells[0].isdigit()]


def test_nothing_goes_to_stderr_and_no_control_characters_to_a_pipe(done):
    assert done.stderr == ""
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", done.stdout)


def test_the_loss_goes_down(done):
    training = [float(cells[1]) for cells in _rows(_chapter(done, 1))]
    validation = [float(cells[2]) for cells in _rows(_chapter(done, 1))]
    assert len(training) == 11
    assert training[-1] < training[0] - 1
    assert validation[-1] < validation[0] - 1


def _live(done):
    """The live bytes after each step, without scopes and with them, as the table prints them."""
    unit = r"([\d.]+ (?:B|[KMGT]iB))"
    rows = re.findall(rf"^ +\d+ +{unit} +{unit}$", _chapter(done, 2), flags=re.MULTILINE)
    assert len(rows) == QUICK.compared_steps
    return zip(*rows, strict=True)


def _bytes(text):
    value, unit = text.split()
    return float(value) * 1024 ** ("B", "KiB", "MiB", "GiB", "TiB").index(unit)


def test_live_bytes_grow_without_scopes_and_stay_flat_with_them(done):
    plain, scoped = _live(done)
    grown = [_bytes(text) for text in plain]
    assert all(later > earlier for earlier, later in itertools.pairwise(grown))
    assert grown[-1] > 3 * grown[0]
    assert len(set(scoped)) == 1


def test_scopes_leave_the_losses_as_they_are(done):
    assert "The losses of the two runs are the same to the last bit." in _chapter(done, 2)


def test_reading_a_loss_that_was_let_go_is_refused(done):
    assert "DisposedTensorError: item() got float32[] on cpu, 4 B, disposed when" in done.stdout


def test_the_report_names_the_list_that_holds_the_leak_and_sums_up_its_graph(done):
    told = _chapter(done, 3)
    assert "<DisposeScope 'step 4'>: " in told
    assert "\n  float32[] on cpu, 4 B, created at" in told
    assert "\n    held by train.<locals>.history[3]" in told
    assert re.search(r"\n  \d+ tensors that autograd saved, [\d.]+ [KM]iB\n", told)
    assert "\n    held by the graph of train.<locals>.history[3]" in told


def test_plain_training_fails_in_too_little_memory_and_so_does_its_retry(done):
    failures = re.findall(r"step 1 fails\. cpu out of memory\.", _chapter(done, 4))
    assert len(failures) == 2


def test_the_sizes_that_were_tried_are_printed(done):
    told = r"^  'loss' ran out of cpu memory at micro-batch \d+ \(.+ more\); goes on with \d+\.$"
    assert re.search(told, _chapter(done, 4), flags=re.MULTILINE)


def test_split_training_has_the_loss_curve_of_the_unsplit_run_within_the_budget(done):
    chapter = _chapter(done, 4)
    rows = [[float(cell) for cell in cells[1:]] for cells in _rows(chapter)]
    assert len(rows) == QUICK.compared_steps
    assert all(abs(whole - split) < 2e-4 for whole, split in rows)
    budget, used = re.search(
        r"there are ([\d.]+ \wiB)\..* finishes within ([\d.]+ \wiB)", chapter, flags=re.DOTALL
    ).groups()
    assert _bytes(used) <= _bytes(budget)


def test_weights_larger_than_their_memory_give_the_same_loss(done):
    chapter = _chapter(done, 5)
    title = re.match(r"5\. (.+) of weights in (.+) of memory\n", chapter)
    assert _bytes(title[2]) < 0.6 * _bytes(title[1])
    # the least times of the two differ
    assert re.search(r"ms by this plan, .*\nThe plan times the copies alone, .*\npass 3:", chapter)
    resident, ring = re.search(r"device +(.+) stay, (.+) to pass through", chapter).groups()
    assert _bytes(resident) + _bytes(ring) <= _bytes(title[2]) + 103  # what rounding hides
    assert "The loss of the paged model is the same to the last bit." in chapter


@pytest.mark.slow
def test_the_same_seed_prints_the_same_text(done):
    timed = re.compile(r"^(pass|  moved|  computed) .*$", flags=re.MULTILINE)
    again = _demo("--seed", "0")
    assert timed.sub("", again.stdout) == timed.sub("", done.stdout)


@pytest.mark.slow
@pytest.mark.slow
def test_steps_and_seed_are_used():
    chapter = _chapter(other := _demo("--steps", "3", "--seed", "7"), 1)
    assert "seed 7." in other.stdout
    assert [cells[0] for cells in _rows(chapter)] == ["1", "2", "3"]


def test_the_docs_show_what_the_demo_prints(done):
    page = Path(__file__).parents[2].joinpath("docs", "demo.md").read_text("utf-8")
    shown = next(block for block in page.split("```") if block.startswith("text\nText: "))
    fixed = [line for line in shown.splitlines()[1:] if line and not re.search(r"\d", line)]
    assert len(fixed) >= 8
    assert [line for line in fixed if line not in done.stdout.splitlines()] == []


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


@pytest.mark.slow
def test_a_step_that_fits_neither_way_has_the_gradients_of_the_whole():
    command = [sys.executable, "-m", "tenure._demo._beyond", "quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Plain PyTorch: sim:0 out of memory." in done.stdout
    assert re.search(r"goes on with \d+\.$", done.stdout, re.MULTILINE)
    one, other = re.search(r"a loss of ([\d.]+), ([\d.]+) whole", done.stdout).groups()
    assert one == other
    apart = re.search(r"differ from those of the whole by (\S+)\.$", done.stdout.strip()).group(1)
    assert float(apart) < 1e-10
    assert done.stderr == ""
