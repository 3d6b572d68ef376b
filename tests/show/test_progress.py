"""Lines of work that takes long: when they come, and where.

The private clock is replaced, because no test waits.
"""

import io
import os
import select
import sys

import pytest

from tenure._show import _progress, steps
from tenure._show import progress as bar_of


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
