"""The calls that may take long, each of which says what it is at; and all of it on a terminal."""

import os
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

from tenure import adaptive
from tenure._show import _progress
from tenure.adaptive import check_split, find_batch_size, plan, predict_peak, step
from tenure.paging import load_paged
from tenure.testing import for_each_allocation
from tests.programs import main


class Display:
    """What calls have told, in the place of the terminal: labels, and what came for each."""

    def __init__(self):
        self.told = {}

    def lines(self, label, are_counted, patience_s):
        return Told(self.told.setdefault(label, []))


class Told:
    def __init__(self, seen):
        self.begin = seen.append


@pytest.fixture
def told(monkeypatch):
    display = Display()
    monkeypatch.setattr(_progress, "_ProgressLines", display.lines)
    yield display.told
    assert not _progress.display.locked()


def _work(n_rows):
    torch.ones(n_rows, 256).square().sum()


def test_a_search_for_a_batch_size_says_which_it_runs(told):
    sizes = []

    def work(n_rows):
        sizes.append(n_rows)
        _work(n_rows)

    find_batch_size(work, high=4096, budget="1MiB")
    (shown,) = told.values()
    assert shown == [f"batch size {size}" for size in sizes]


def test_a_search_by_predictions_says_which_size_is_predicted(told):
    find_batch_size(_work, high=4096, budget="1MiB", predict=True)
    shown = told["find_batch_size(_work)"]
    assert shown[0] == "a prediction of batch size 1"
    assert re.fullmatch(r"batch size \d+", shown[-1])


def test_a_step_that_did_not_fit_says_which_trials_it_makes(told):
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1))
    with adaptive.memory_budget("3MiB"):
        step(lambda x: model(x).square().mean(), torch.ones(2048, 256))
    (shown,) = told.values()
    assert shown
    assert all(re.fullmatch(r"a trial of micro-batch \d+", each) for each in shown)


def test_what_fits_at_once_says_nothing(told):
    model = nn.Linear(4, 1)
    step(lambda x: model(x).mean(), torch.ones(8, 4))
    assert told == {}


@pytest.mark.slow
def test_a_step_that_is_predicted_says_which_sizes(told):
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1))
    with adaptive.memory_budget("3MiB"):
        step(lambda x: model(x).square().mean(), torch.ones(2048, 256), predict=True)
    assert told["predictions"][0] == "size 2048"
    assert len(told["predictions"]) > 1


@pytest.mark.slow
def test_a_plan_says_which_micro_batch_and_advice_which_change(told):
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    batch = torch.empty(1000, 64, device="meta")
    plan(lambda x: model(x).square().mean(), batch, "400KiB", margin=0)
    assert told["plan"][:3] == ["micro-batch 1000", "micro-batch 391", "micro-batch 140"]
    report = predict_peak(lambda x: model(x).square().mean(), batch)
    assert {each.what for each in report.advice} <= {*told["advice"]}


def test_a_check_says_which_of_its_runs(told):
    model = nn.Linear(4, 1)
    check_split(lambda x: model(x).square().sum(), torch.ones(8, 4))
    (shown,) = told.values()
    assert shown == [
        "in one piece",
        "in two pieces",
        "in one piece again",
        "with other declarations",
    ]


def test_a_fault_sweep_says_which_allocation(told, sim):
    for_each_allocation(lambda: torch.ones(4, device=sim.device) + 1)
    assert told["for_each_allocation"] == [f"allocation {n} fails" for n in (1, 2, 3)]


def test_weights_of_files_say_how_many_are_read(told, sim, tmp_path):
    save_file = pytest.importorskip("safetensors.torch", reason="needs safetensors").save_file
    save_file(nn.Linear(64, 64).state_dict(), str(tmp_path / "model.safetensors"))
    with load_paged(nn.Linear(64, 64, device="meta"), tmp_path, sim.device, budget="1MiB"):
        pass
    assert told["opening files"] == ["1 of 1"]
    # with what aligns them
    assert re.fullmatch(r"(1\d\.\d KiB) of \1", told["copying weights"][-1])


PROGRAM = """
from torch import nn
import torch

def setup():
    net = nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 256))
    return lambda x: net(x).square().mean(), torch.randn(512, 256)
"""


@pytest.mark.slow
def test_the_verb_that_fits_says_what_it_looks_for(told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tmp_path.joinpath("fit_me.py").write_text(PROGRAM)
    main(["fit", "fit_me.py:setup", "--device", "cpu", "--device-memory", "6MiB"])
    assert told["plan"][0] == "micro-batch 512"
    assert told["advice"]


def test_of_calls_in_one_another_the_outermost_says_what_it_is_at(told):
    def work(n_rows):
        find_batch_size(_work, high=2)

    find_batch_size(work, high=2)
    assert len(told) == 1


def test_an_error_lets_the_next_call_say_what_it_is_at(told):
    def work(n_rows):
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        find_batch_size(work, high=2)
    assert not _progress.display.locked()


ON_A_TERMINAL = """
import torch
from tenure._show import _progress
from tenure.adaptive import find_batch_size

now = iter(range(0, 10**6, 2))
_progress.monotonic = lambda: float(next(now))


def work(n_rows):
    print(f"loss of {n_rows}: 0.25", flush=True)
    torch.ones(n_rows, 256).square().sum()


print(find_batch_size(work, high=4096, budget="1MiB"), flush=True)
"""


def _on_a_terminal(**environment):
    """What a program shows, on a terminal that has both of its streams."""
    pty = pytest.importorskip("pty", reason="there are no pseudo terminals here")
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "OMP_NUM_THREADS": "1", **environment}
    with subprocess.Popen(
        [sys.executable, "-c", ON_A_TERMINAL], stdout=theirs, stderr=theirs, env=environment
    ) as program:
        os.close(theirs)
        shown = b""
        while True:
            try:
                read = os.read(ours, 1 << 16)
            # Linux says so when the other end is closed, and others say nothing
            except OSError:
                break
            if not read:
                break
            shown += read
    os.close(ours)
    assert program.returncode == 0, shown.decode()
    return shown.decode().replace("\r\n", "\n")


@pytest.mark.slow
def test_lines_of_the_program_and_of_the_search_are_whole():
    shown = _on_a_terminal(TENURE_PROGRESS="1")
    assert "\r" not in shown
    assert "\x1b" not in shown
    lines = shown.splitlines()
    ours = [line for line in lines if line.startswith("tenure: ")]
    # the first step begins after 2 s, the second after 4 s; the next line comes after 8 s
    assert [re.search(r"step (\d+), (\d+) s", line).groups() for line in ours] == [
        ("1", "2"), ("2", "4"), ("4", "8"),
    ]  # fmt: skip
    for line in ours:
        assert re.fullmatch(
            r"tenure: find_batch_size\(work\): batch size \d+ \(step \d+, \d+ s\)", line
        )
    theirs = [line for line in lines if line not in ours]
    assert all(re.fullmatch(r"loss of \d+: 0\.25|\d+", line) for line in theirs)
    # what is told stands above what the size prints
    tried = re.search(r"batch size (\d+)", ours[0])[1]
    assert lines[lines.index(ours[0]) + 1] == f"loss of {tried}: 0.25"


@pytest.mark.slow
def test_the_environment_turns_lines_off():
    assert "tenure:" not in _on_a_terminal(TENURE_PROGRESS="0")
