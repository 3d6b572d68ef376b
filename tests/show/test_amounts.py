"""What a total is made of: as text to the letter, as colours in rich, as a drawing in HTML."""

import io

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from tenure.adaptive import PeakReport
from tenure.profiler import DeviceReport, MemReport

from .pages import read_html

GIB = 2**30
PARTS = {
    "parameters": GIB,
    "buffers": 16,
    "gradients": GIB,
    "inputs": 0,
    "activations": 3 * GIB // 2,
    "temporaries": GIB // 10,
}


def predicted(parts, limit=None):
    peak = sum(parts.values())
    return PeakReport(peak, 0, parts, "backward", "", "", "cpu", False, (), budget_bytes=limit)


def table_of(report, width=None):
    text = report.text(width=width)
    return text[text.index("category") :]


def test_each_part_begins_where_the_one_above_it_ends():
    assert table_of(predicted(PARTS)) == (
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
    parts = {name: PARTS[name] for name in ("parameters", "buffers", "gradients")}
    assert table_of(predicted(parts, 4 * GIB)) == (
        "category      bytes   share\n"
        "----------  -------  ------  --------------------------------\n"
        "parameters  1.0 GiB   50.0%  ████████\n"
        "buffers        16 B    0.0%\n"
        "gradients   1.0 GiB   50.0%          ████████\n"
        "total       2.0 GiB  100.0%  ████████████████\n"
        "budget      4.0 GiB  200.0%  ████████████████████████████████"
    )
    assert table_of(predicted(PARTS, 2 * GIB)).split("\n")[-2:] == [
        "total          3.6 GiB  100.0%  ████████████████████████████████",
        "budget         2.0 GiB   55.6%  █████████████████▊",
    ]


def test_of_nothing_there_is_nothing_to_draw():
    text = "category  bytes  share\n--------  -----  -----\ntotal       0 B"
    assert table_of(predicted({"inputs": 0})) == text


def test_a_negative_part_is_told_and_not_drawn():
    report = MemReport((DeviceReport("cpu", (), {"parameters": 3 * GIB}, 2 * GIB, True),))
    assert table_of(report).startswith(
        "category        bytes   share\n"
        "-----------  --------  ------  --------------------------------\n"
        "parameters    3.0 GiB  150.0%  ████████████████████████████████\n"
        "unexplained  -1.0 GiB  -50.0%\n"
        "total         2.0 GiB  100.0%  █████████████████████▎\n"
    )


def test_rich_shows_the_same_lines_in_colours():
    console = Console(
        file=io.StringIO(), width=90, force_terminal=True, color_system="truecolor", record=True
    )
    console.print(predicted(PARTS, 2 * GIB))
    written = console.file.getvalue()
    assert "\x1b[38;2;74;128;248mparameters" in written
    assert "\x1b[38;2;74;128;248;49m████████▉" in written
    shown = console.export_text()
    assert "budget         2.0 GiB   55.6%  █████████████████▊" in shown


def test_html_has_the_same_lines_in_the_same_colours():
    _, text = read_html(predicted(PARTS, 4 * GIB)._repr_html_())
    assert "parameters     1.0 GiB   27.8%  ████████" in text
    for parts in (PARTS, {"gradients": GIB, "inputs": 2}):
        shown = predicted(parts)._repr_html_()
        assert '<span style="color: #ffc154; text-decoration-color: #ffc154">gradients' in shown


def test_html_is_escaped():
    shown = predicted({"<script>": 1, "<i>": 2}, 4)._repr_html_()
    assert {tag for tag, _ in read_html(shown)[0]} == {"pre", "span"}


parts = st.dictionaries(st.text("ab", max_size=2), st.integers(0, 2**50), max_size=8)


@given(parts, st.none() | st.integers(0, 2**50))
@example({"a": 1}, 10**11)
def test_any_parts_have_lines_as_wide_as_the_bar(parts, limit):
    report = predicted(parts, limit)
    assert all(len(line) <= 70 for line in table_of(report, 80).split("\n"))
    read_html(report._repr_html_())


@pytest.mark.parametrize("measured", [10, 12])
def test_the_sums_of_a_memory_report_are_drawn_as_those_of_a_prediction(measured):
    report = MemReport((DeviceReport("cpu", (), {"parameters": 8}, measured, True, 20),))
    drawn = predicted({"parameters": 8, "unexplained": measured - 8})
    assert table_of(report).startswith(table_of(drawn) + "\n")
    _, text = read_html(report._repr_html_())
    assert table_of(drawn).split("\n")[2] in text
