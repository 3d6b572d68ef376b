"""Every report fits its terminal, loses no letter, and takes the same arguments.

Tables and paragraphs are made here by their private names, because no report has one of each kind.
"""

import html
import io
import re

import pytest
from rich.console import Console

from tenure._errors import ProfilerUsageError
from tenure._show import Code, Column, Paragraph, Table, bytes_column, in_bytes, storage_bytes
from tenure._visible import visible
from tenure.adaptive import PeakReport
from tenure.profiler import DeviceReport, MemReport
from tests.profiler.recording.makers import growth, recording

from .report_samples import REPORTS

PLACE = "/opt/lib/torch/nn/modules/transformer.py:123"


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)
def test_a_report_fits_the_terminal_and_rich_and_html_show_its_lines_escaped(report):
    for width in (60, 100):
        console = Console(file=io.StringIO(), width=width)
        console.print(report)
        lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
        assert max(map(len, lines)) <= width
        assert lines == report.text(width=width).splitlines()
        # no heading stands over nothing
        assert set(lines[-1]) - set("- ")
    page = report._repr_html_()
    assert {tag.split()[0] for tag in re.findall(r"<([^>]*)>", page)} <= {
        "pre",
        "span",
        "/pre",
        "/span",
    }
    shown = html.unescape(re.sub(r"<[^>]*>", "", page))
    assert shown.split() == report.text(width=120).split()
    fewest, all_rows = (report.text(top=top, width=80).splitlines() for top in (1, 10**6))
    assert len(fewest) <= len(all_rows)
    for heading in {heading for part in report._parts() for heading in part.sorts()}:
        report.text(sort=heading, top=1)


def test_a_column_that_no_table_has_is_refused():
    with pytest.raises(ProfilerUsageError, match=r"a column 'x'\. There are 'held by'"):
        REPORTS["difference"].text(sort="x")
    with pytest.raises(ProfilerUsageError, match="top=-1 is no number of rows"):
        REPORTS["difference"].text(top=-1)


def test_a_name_that_is_wider_than_its_column_goes_on_in_the_next_line(monkeypatch):
    table = Table("", (Column("at"), bytes_column()), [(PLACE, in_bytes(8))], rule="")
    first, *others = table.text(30).split("\n")[1:]
    assert first.endswith("    8 B")
    assert first.split()[0] + "".join(others) == PLACE
    assert Paragraph("", f"- {PLACE}").text(30).replace("\n  ", "") == f"- {PLACE}"
    monkeypatch.setenv("TERM", "dumb")
    for width in (1, 4):
        lines = Paragraph("", f"    {PLACE} and more").text(width).split("\n")
        assert max(map(len, lines)) <= 7
    assert len(Paragraph("", "word " * 24).text(130).split("\n")) == 1


def test_code_to_paste_is_whole_whatever_the_width():
    lines = "import torch\n\n" + "    call(" + "x" * 90 + ")"
    assert Code("To paste:", lines).text(40) == f"To paste:\n{lines}"


def test_the_largest_stand_first_and_the_others_are_summed_up():
    rows = [(f"t{n}", in_bytes(n)) for n in (1, 30, 2)]
    table = Table("", (Column("name"), bytes_column()), rows, by="bytes")
    assert table.arranged(1, None).text(80) == (
        "name        bytes\n----------  -----\nt30          30 B\nand 2 more    3 B"
    )
    shown = " ".join(table.arranged(None, "name").text(80).split()[4:])
    assert shown == "t1 1 B t2 2 B t30 30 B"
    # of equal ones the one that counts the storage
    rows = [(name, storage_bytes(8, is_shared=name != "base")) for name in ("view", "base", "w")]
    table = Table("", (Column("name"), bytes_column("storage")), rows, by="storage", rule="")
    shown = " ".join(table.arranged(None, None).text(80).split()[2:])
    assert shown == "base 8 B view (8 B) w (8 B)"
    assert table.arranged(0, None).text(80).split()[2:] == ["and", "3", "more", "8", "B"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;title\x07\x9b2J", r"\x1b]0;title\x07\x9b2J"),
        ("a\u202eb\u2066c\u200f", r"a\u202eb\u2066c\u200f"),
        ("one\rtwo\x0bthree\u2028four", r"one\rtwo\x0bthree\u2028four"),
        ("half \ud800", r"half \ud800"),
        ("\ufeffno\u200bthing", r"\ufeffno\u200bthing"),
        ("שלום, \u00a0日本\né, ▁▂", "שלום, \u00a0日本\né, ▁▂"),
    ],
)
def test_a_character_that_does_more_than_show_itself_is_spelled(text, shown):
    assert visible(text) == shown
    assert Paragraph("", text).text(200) == shown


# some of https://www.unicode.org/Public/17.0.0/ucd/DerivedCoreProperties.txt,
# Default_Ignorable_Code_Point
SHOWN_AS_NOTHING = [
    *(0xAD, 0x34F, 0x61C, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x3164, 0xFEFF, 0xFFA0),
    *(0x180B, 0x200B, 0x202A, 0x2060, 0xFE00, 0xFFF0, 0x1BCA0, 0x1D173, 0xE0000, 0xE0FFF),
]


def test_a_character_that_is_shown_as_nothing_is_spelled():
    hidden = "".join(map(chr, SHOWN_AS_NOTHING))
    found = recording(growth=(growth(f"losses{hidden}"),))
    for shown in (str(found), found._repr_html_()):
        assert r"losses\xad\u034f" in shown.replace("\n", "")
        assert set(shown).isdisjoint(hidden)


def test_wide_characters_stand_in_line():
    rows = [("重み", in_bytes(1024)), ("weight", in_bytes(2048))]
    table = Table("", (Column("名前"), bytes_column()), rows)
    assert table.text(80) == ("名前      bytes\n------  -------\n重み    1.0 KiB\nweight  2.0 KiB")
    assert Paragraph("", "重み" * 5).text(8) == "重み重み\n重み重み\n重み"


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


def test_rich_and_html_show_a_part_and_its_bar_in_their_colour():
    console = Console(file=io.StringIO(), width=90, force_terminal=True, color_system="truecolor")
    console.print(predicted(PARTS, 2 * GIB))
    written = console.file.getvalue()
    assert "\x1b[38;2;74;128;248mparameters" in written
    assert "\x1b[38;2;74;128;248;49m████████▉" in written
    shown = predicted(PARTS)._repr_html_()
    assert '<span style="color: #ffc154; text-decoration-color: #ffc154">gradients' in shown
