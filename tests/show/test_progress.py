"""Lines of work that takes long: when they come, where, and what each call says that it is at.

The private clock and lines are replaced, because no test waits, and a quick call shows nothing.
"""

import io
import os
import re
import select
import subprocess
import sys

import pytest
import torch
from torch import nn

from tenure import adaptive
from tenure._show import _progress, steps
from tenure._show import progress as bar_of
from tenure.adaptive import check_split, find_batch_size, plan, predict_peak, step
from tenure.paging import load_paged
from tenure.testing import for_each_allocation
from tests.programs import main


class Clock:
    """Seconds that pass when the test says so."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(_progress, "monotonic", clock)
    return clock


class Terminal:
    """A pseudo terminal, and what was written to it since it was last asked."""

    def __init__(self, pty):
        self._ours, theirs = pty.openpty()
        self.stream = os.fdopen(theirs, "w", encoding="utf-8")

    def __call__(self):
        self.stream.flush()
        text = b""
        # the kernel hands over what was written a little later, in pieces
        while select.select([self._ours], [], [], 0.2)[0]:
            text += os.read(self._ours, 1 << 16)
        return text.decode()

    def close(self):
        self.stream.close()
        os.close(self._ours)


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("TENURE_PROGRESS", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    terminal = Terminal(pytest.importorskip("pty", reason="there are no pseudo terminals here"))
    yield terminal
    terminal.close()


def test_work_of_a_known_size_says_how_much_of_it_is_done(clock, terminal, monkeypatch, capsys):
    # here and below in the test itself: pytest puts a stream of its own there before it
    monkeypatch.setattr(sys, "stderr", terminal.stream)
    with bar_of("reading weights", 10) as done:
        clock.now = 1.9
        done(1)
        assert terminal() == ""
        clock.now = 2.1
        done(3)
        assert terminal().strip() == "tenure: reading weights: 4 of 10 (2 s)"
        clock.now = 4.1
        done(1)
        assert terminal() == ""
    with bar_of("reading weights", 1 << 30, in_bytes=True) as done:
        clock.now = 8.0
        done(1 << 20)
        assert terminal().strip() == "tenure: reading weights: 1.0 MiB of 1.0 GiB (4 s)"
    assert capsys.readouterr().out == ""


def test_a_first_step_that_may_be_long_is_said_at_once(clock, terminal, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal.stream)
    with steps("fit", patience_s=0) as show:
        show("reading the configuration")
        assert terminal().strip() == "tenure: fit: reading the configuration (step 1, 0 s)"
        clock.now = 1.0
        show("one sample")
        assert terminal() == ""
        clock.now = 2.5
        show("two samples")
        assert terminal().strip() == "tenure: fit: two samples (step 3, 2 s)"


@pytest.mark.parametrize(("name", "value"), [("TENURE_PROGRESS", "0"), ("LOCAL_RANK", "1")])
def test_the_environment_turns_it_off(clock, terminal, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stderr", terminal.stream)
    with bar_of("reading weights", 10) as done:
        clock.now = 3.0
        done(4)
    assert terminal() == ""


@pytest.mark.parametrize("stream", [io.StringIO(), None], ids=["no terminal", "none"])
def test_without_a_terminal_nothing_is_drawn(clock, monkeypatch, stream):
    monkeypatch.setattr(sys, "stderr", stream)
    with bar_of("reading weights", 10) as done:
        clock.now = 3.0
        done(4)
    assert stream is None or stream.getvalue() == ""


def test_a_terminal_that_is_gone_is_no_error_of_the_work(clock, monkeypatch):
    class Gone(io.StringIO):
        def isatty(self):
            return True

        def write(self, text):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(sys, "stderr", Gone())
    with bar_of("reading weights", 10) as done:
        clock.now = 3.0
        done(4)
        clock.now = 4.0
        done(4)


def test_lines_come_ever_later_and_stay(clock, terminal, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal.stream)
    with steps("search") as show:
        for second in range(20):
            clock.now = float(second)
            show(f"size {second}")
    assert terminal().splitlines() == [
        "tenure: search: size 2 (step 3, 2 s)",
        "tenure: search: size 4 (step 5, 4 s)",
        "tenure: search: size 8 (step 9, 8 s)",
        "tenure: search: size 16 (step 17, 16 s)",
    ]


@pytest.mark.parametrize("shown", [lambda: steps("inner"), lambda: bar_of("inner", 2)])
def test_of_two_displays_the_outermost_alone_is_drawn(clock, terminal, monkeypatch, shown):
    monkeypatch.setattr(sys, "stderr", terminal.stream)
    with steps("outer") as show:
        with shown() as done:
            clock.now = 3.0
            done(1)
            assert terminal() == ""
        show("size 1")
        assert "outer: size 1" in terminal()
        assert _progress.display.locked()
    assert not _progress.display.locked()


def _open_tqdm():
    return pytest.importorskip("tqdm", reason="needs tqdm").tqdm(total=2, file=io.StringIO()).close


def _open_rich():
    import rich
    from rich.progress import Progress

    bar = Progress(console=rich.get_console(), auto_refresh=False)
    bar.start()
    return bar.stop


@pytest.mark.parametrize("opened", [_open_tqdm, _open_rich])
def test_nothing_is_drawn_into_a_display_of_the_program(clock, terminal, monkeypatch, opened):
    monkeypatch.setattr(sys, "stderr", terminal.stream)
    close = opened()
    try:
        with steps("search") as show:
            clock.now = 3.0
            show("size 1")
            assert terminal() == ""
            close()
            clock.now = 7.0
            show("size 2")
            assert "size 2" in terminal()
    finally:
        close()


# --- the calls that may take long, and all of it on a terminal


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
    shown = Display()
    monkeypatch.setattr(_progress, "_ProgressLines", shown.lines)
    yield shown.told
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
