"""Lines of work that takes long: when they come, where, and what each call says that it is at.

The private clock and lines are replaced, because no test waits, and a quick call shows nothing.
"""

import io
import re
import sys

import pytest
import torch
from torch import nn

from tenure import adaptive
from tenure._show import _progress, steps
from tenure._show import progress as bar_of
from tenure.adaptive import find_batch_size, step
from tenure.paging import load_paged
from tenure.testing import for_each_allocation


@pytest.fixture
def at(monkeypatch):
    """Say that so many seconds have passed."""
    seconds = [0.0]
    monkeypatch.setattr(_progress, "monotonic", lambda: seconds[0])
    return lambda now: seconds.__setitem__(0, now)


class Terminal(io.StringIO):
    """A terminal, and what was written to it since it was last asked."""

    def isatty(self):
        return True

    def __call__(self):
        text = self.getvalue()
        self.seek(0)
        self.truncate()
        return text


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.delenv("TENURE_PROGRESS", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return Terminal()


def test_work_of_a_known_size_says_how_much_of_it_is_done(at, terminal, monkeypatch, capsys):
    # here and below in the test itself: pytest puts a stream of its own there before it
    monkeypatch.setattr(sys, "stderr", terminal)
    with bar_of("reading weights", 10) as done:
        at(1.9)
        done(1)
        assert terminal() == ""
        at(2.1)
        done(3)
        assert terminal().strip() == "tenure: reading weights: 4 of 10 (2 s)"
    with bar_of("reading weights", 1 << 30, in_bytes=True) as done:
        at(8.0)
        done(1 << 20)
        assert terminal().strip() == "tenure: reading weights: 1.0 MiB of 1.0 GiB (6 s)"
    assert capsys.readouterr().out == ""


def test_steps_are_said_ever_later_and_stay_and_the_first_at_once_if_it_may_be_long(
    at, terminal, monkeypatch
):
    monkeypatch.setattr(sys, "stderr", terminal)
    for patience_s in (2, 0):
        with steps("search", patience_s=patience_s) as show:
            for second in range(20):
                at(float(second))
                show(f"size {second}")
        at(0.0)
        expected = [f"tenure: search: size {n} (step {n + 1}, {n} s)" for n in (0, 2, 4, 8, 16)]
        assert terminal().splitlines() == expected[patience_s // 2 :]


class Gone(Terminal):
    def write(self, text):
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize(
    ("stream", "environment"),
    [
        (Terminal(), {"TENURE_PROGRESS": "0"}),
        (Terminal(), {"LOCAL_RANK": "1"}),
        (io.StringIO(), {}),
        (None, {}),
        (Gone(), {}),
    ],
    ids=["turned off", "another rank", "a file", "none", "gone"],
)
@pytest.mark.usefixtures("terminal")
def test_where_nobody_looks_nothing_is_drawn_and_nothing_raises(
    at, monkeypatch, stream, environment
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stderr", stream)
    with bar_of("reading weights", 10) as done:
        at(3.0)
        done(4)
    assert stream is None or stream.getvalue() == ""


def test_of_two_displays_the_outermost_alone_is_drawn(at, terminal, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal)
    with steps("outer") as show:
        with bar_of("inner", 2) as done:
            at(3.0)
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
def test_nothing_is_drawn_into_a_display_of_the_program(at, terminal, monkeypatch, opened):
    monkeypatch.setattr(sys, "stderr", terminal)
    close = opened()
    try:
        with steps("search") as show:
            at(3.0)
            show("size 1")
            assert terminal() == ""
            close()
            at(7.0)
            show("size 2")
            assert "size 2" in terminal()
    finally:
        close()


# --- the calls that may take long


@pytest.fixture
def told(monkeypatch):
    """What calls have told, in the place of the terminal: by label what came."""
    told = {}

    class Lines:
        def __init__(self, label, are_counted, patience_s):
            self.begin = told.setdefault(label, []).append

    monkeypatch.setattr(_progress, "_ProgressLines", Lines)
    yield told
    assert not _progress.display.locked()


def _loss_of(width):
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
    return lambda x: model(x).square().mean()


def test_a_search_for_a_batch_size_says_which_it_runs(told):
    sizes = []

    def work(n_rows):
        sizes.append(n_rows)
        torch.ones(n_rows, 256).square().sum()

    find_batch_size(work, high=4096, budget="1MiB")
    (shown,) = told.values()
    assert shown == [f"batch size {size}" for size in sizes]
    with pytest.raises(ZeroDivisionError):
        find_batch_size(lambda n_rows: 1 / 0, high=2)


def test_a_step_that_did_not_fit_says_which_trials_and_sizes_it_tries(told):
    step(_loss_of(4), torch.ones(8, 4))
    assert told == {}
    loss_of = _loss_of(256)
    with adaptive.memory_budget("3MiB"):
        step(loss_of, torch.ones(2048, 256))
    (shown,) = told.values()
    assert shown
    assert all(re.fullmatch(r"a trial of micro-batch \d+", each) for each in shown)
    adaptive.reset()
    with adaptive.memory_budget("3MiB"):
        step(loss_of, torch.ones(2048, 256), predict=True)
    assert told["predictions"][0] == "size 2048"
    assert len(told["predictions"]) > 1


def test_a_fault_sweep_and_weights_of_files_say_how_far_they_are(told, sim, tmp_path):
    for_each_allocation(lambda: torch.ones(4, device=sim.device) + 1)
    assert told["for_each_allocation"] == [f"allocation {n} fails" for n in (1, 2, 3)]
    save_file = pytest.importorskip("safetensors.torch", reason="needs safetensors").save_file
    save_file(nn.Linear(64, 64).state_dict(), str(tmp_path / "model.safetensors"))
    with load_paged(nn.Linear(64, 64, device="meta"), tmp_path, sim.device, budget="1MiB"):
        pass
    assert told["opening files"] == ["1 of 1"]
    # with what aligns them
    assert re.fullmatch(r"(1\d\.\d KiB) of \1", told["copying weights"][-1])
