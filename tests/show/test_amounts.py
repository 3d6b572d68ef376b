"""What a total is made of: as text to the letter, as colours in rich, as a drawing in HTML."""

import io

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


def test_each_part_begins_where_the_one_above_it_ends_and_what_there_is_has_the_last_row():
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
    assert table_of(predicted({"parameters": GIB, "gradients": GIB}, 4 * GIB)) == (
        "category      bytes   share\n"
        "----------  -------  ------  --------------------------------\n"
        "parameters  1.0 GiB   50.0%  ████████\n"
        "gradients   1.0 GiB   50.0%          ████████\n"
        "total       2.0 GiB  100.0%  ████████████████\n"
        "budget      4.0 GiB  200.0%  ████████████████████████████████"
    )
    assert table_of(predicted(PARTS, 2 * GIB)).split("\n")[-2:] == [
        "total          3.6 GiB  100.0%  ████████████████████████████████",
        "budget         2.0 GiB   55.6%  █████████████████▊",
    ]
    text = "category  bytes  share\n--------  -----  -----\ntotal       0 B"
    assert table_of(predicted({"inputs": 0})) == text
    # nobody is told how many thousand times more there is
    assert table_of(predicted({"a": 1}, 10**11)).split()[-3:-1] == ["93.1", "GiB"]


def test_the_sums_of_a_memory_report_are_drawn_alike_and_a_negative_part_is_not():
    report = MemReport((DeviceReport("cpu", (), {"parameters": 3 * GIB}, 2 * GIB, True),))
    assert table_of(report).startswith(
        "category        bytes   share\n"
        "-----------  --------  ------  --------------------------------\n"
        "parameters    3.0 GiB  150.0%  ████████████████████████████████\n"
        "unexplained  -1.0 GiB  -50.0%\n"
        "total         2.0 GiB  100.0%  █████████████████████▎\n"
    )
    report = MemReport((DeviceReport("cpu", (), {"parameters": 8}, 12, True, 20),))
    assert table_of(report).startswith(
        table_of(predicted({"parameters": 8, "unexplained": 4})) + "\n"
    )


def test_rich_and_html_show_the_same_lines_in_the_same_colours_escaped():
    console = Console(
        file=io.StringIO(), width=90, force_terminal=True, color_system="truecolor", record=True
    )
    console.print(predicted(PARTS, 2 * GIB))
    written = console.file.getvalue()
    assert "\x1b[38;2;74;128;248mparameters" in written
    assert "\x1b[38;2;74;128;248;49m████████▉" in written
    assert "budget         2.0 GiB   55.6%  █████████████████▊" in console.export_text()
    shown = predicted(PARTS | {"<script>": 1}, 4 * GIB)._repr_html_()
    tags, text = read_html(shown)
    assert "parameters     1.0 GiB   27.8%  ████████" in text
    assert '<span style="color: #ffc154; text-decoration-color: #ffc154">gradients' in shown
    assert {tag for tag, _ in tags} == {"pre", "span"}
