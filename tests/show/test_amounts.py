"""What a total is made of: as text to the letter, as colours in rich, as a drawing in HTML."""

import io

from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from tenure._show import Amounts, in_html
from tenure.profiler import DeviceReport, MemReport, TensorRow

from .pages import read_html

GIB = 2**30
PARTS = (
    ("parameters", GIB),
    ("buffers", 16),
    ("gradients", GIB),
    ("inputs", 0),
    ("activations", 3 * GIB // 2),
    ("temporaries", GIB // 10),
)


def test_each_part_begins_where_the_one_above_it_ends():
    assert Amounts("", PARTS).text() == (
        "category         bytes   share\n"
        "-----------  ---------  ------  --------------------------------\n"
        "parameters     1.0 GiB   27.8%  ████████▉\n"
        "buffers           16 B    0.0%          ▕\n"
        "gradients      1.0 GiB   27.8%          ▕████████▊\n"
        "activations    1.5 GiB   41.7%                   ▕█████████████\n"
        "temporaries  102.4 MiB    2.8%                                 █\n"
        "total          3.6 GiB  100.0%  ████████████████████████████████"
    )


def test_what_there_is_has_the_last_row():
    assert Amounts("Device", PARTS[:3], 4 * GIB).text() == (
        "Device\n"
        "category      bytes   share\n"
        "----------  -------  ------  --------------------------------\n"
        "parameters  1.0 GiB   50.0%  ████████\n"
        "buffers        16 B    0.0%\n"
        "gradients   1.0 GiB   50.0%          ████████\n"
        "total       2.0 GiB  100.0%  ████████████████\n"
        "budget      4.0 GiB  200.0%  ████████████████████████████████"
    )
    assert Amounts("", PARTS, 2 * GIB).text().split("\n")[-2:] == [
        "total          3.6 GiB  100.0%  ████████████████████████████████",
        "budget         2.0 GiB   55.6%  █████████████████▊",
    ]


def test_of_nothing_there_is_nothing_to_draw():
    text = "category  bytes  share\n--------  -----  -----\ntotal       0 B"
    assert Amounts("", [("inputs", 0)]).text() == text


def test_a_negative_part_is_told_and_not_drawn():
    amounts = Amounts("", [("parameters", 3 * GIB), ("unexplained", -GIB)])
    assert amounts.text() == (
        "category        bytes   share\n"
        "-----------  --------  ------  --------------------------------\n"
        "parameters    3.0 GiB  150.0%  ████████████████████████████████\n"
        "unexplained  -1.0 GiB  -50.0%\n"
        "total         2.0 GiB  100.0%  █████████████████████▎"
    )


def test_rich_shows_the_same_lines_in_colours():
    console = Console(
        file=io.StringIO(), width=90, force_terminal=True, color_system="truecolor", record=True
    )
    console.print(Amounts("", PARTS, 2 * GIB))
    written = console.file.getvalue()
    assert "\x1b[38;2;74;128;248mparameters" in written
    assert "\x1b[38;2;74;128;248;49m████████▉" in written
    shown = console.export_text()
    assert "budget         2.0 GiB   55.6%  █████████████████▊" in shown


def test_html_has_the_same_lines_in_the_same_colours():
    _, text = read_html(in_html(Amounts("Here", PARTS, 4 * GIB)))
    assert "parameters     1.0 GiB   27.8%  ████████" in text
    first, second = (in_html(Amounts("", parts)) for parts in (PARTS, PARTS[2:]))
    for shown in (first, second):
        assert '<span style="color: #ffc154; text-decoration-color: #ffc154">gradients' in shown


def test_html_is_escaped():
    shown = in_html(Amounts("<i>", [("<script>", 1)], 4))
    assert {tag for tag, _ in read_html(shown)[0]} == {"pre", "span"}


parts = st.lists(st.tuples(st.text("ab", max_size=2), st.integers(0, 2**50)), max_size=8)


@given(parts, st.none() | st.integers(0, 2**50))
@example([("a", 1)], 10**11)
def test_any_parts_have_lines_as_wide_as_the_bar(parts, limit):
    amounts = Amounts("", parts, limit)
    assert all(len(line) <= 70 for line in amounts.text(80).split("\n"))
    read_html(in_html(amounts))


def test_the_sums_of_a_memory_report_are_drawn_as_those_of_a_prediction():
    rows = (TensorRow("w", "parameters", (2,), "float32", "cpu", 8),)
    sums = {"parameters": 8, "gradients": 0}
    report = MemReport((DeviceReport("cpu", rows, sums, 10, True, 20),))
    console = Console(file=io.StringIO(), width=90, record=True)
    console.print(report)
    assert "unexplained    2 B   20.0%  " in console.export_text()
    _, text = read_html(report._repr_html_())
    assert "parameters     8 B   80.0%" in text
