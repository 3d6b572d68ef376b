"""Every report fits its terminal, loses no letter, and takes the same arguments.

Tables and paragraphs are made here by their private names, because no report has one of each kind.
"""

import html
import io
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tenure._callers import line_in
from tenure._errors import ProfilerUsageError
from tenure._show import (
    Code,
    Column,
    Paragraph,
    Shown,
    Table,
    bytes_column,
    in_bytes,
    storage_bytes,
)
from tenure._visible import visible
from tenure.profiler import Branch, HostTimeline, Timeline
from tests.profiler.recording.makers import growth, recording

from .report_samples import REPORTS

PLACE = "/opt/lib/torch/nn/modules/transformer.py:123"


def kinds_below(kind):
    return {kind} | {each for below in kind.__subclasses__() for each in kinds_below(below)}


def test_every_kind_of_report_is_held_by_these_tests():
    made_here = {
        kind for kind in kinds_below(Shown) - {Shown} if kind.__module__.startswith("tenure.")
    }
    abstract = {kind for kind in made_here if "_parts" not in vars(kind)}
    # by name: a dataclass with slots is made twice
    shown = {type(report).__name__ for report in REPORTS.values()}
    # a profiler shows its figures, which are among the reports
    assert {kind.__name__ for kind in made_here - abstract} - {"LineProfiler"} == shown


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
        report.text(sort=heading)


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


def test_text_is_broken_at_spaces_tables_end_code_in_an_ellipsis_and_code_to_paste_is_whole():
    items = Paragraph("", "- one two three\n  and more of it\n" + "a" * 22)
    assert items.text(20).split("\n") == ["- one two three", "  and more of it", "a" * 20, "aa"]
    assert Paragraph("", "- one two three\n  and more").text(9).split("\n") == [
        "- one two",
        "  three",
        "  and",
        "    more",
    ]
    code = Table("", (Column("code", is_code=True),), [("    scores = torch.matmul(a)",)], rule="")
    assert code.text(20).split("\n")[1] == "    scores = torch.…"
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


def test_a_column_that_is_empty_everywhere_is_left_out_unless_it_is_fixed():
    columns = [Column("a"), Column("b", ">"), Column("c", ">", is_fixed=True)]
    table = Table("title", columns, [("x", "", ""), ("yy", "", "")])
    assert table.text() == "title\na   c\n--  -\nx\nyy"


def test_a_file_is_told_from_the_working_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert line_in(str(tmp_path / "a" / "b.py"), 3) == f"{Path('a', 'b.py')}:3"
    assert line_in("/elsewhere/b.py", 3) == "/elsewhere/b.py:3"


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


def test_the_repr_of_a_record_of_many_numbers_counts_what_is_long():
    record = HostTimeline((1, 2.5, None), {"cpu": (1, 2)})
    assert repr(record) == "HostTimeline(times_s=(1, 2.5, None), rss_bytes=<1 item>)"
    with Timeline() as timeline:
        kept = [torch.ones(16) for _ in range(300)]
    device = timeline.report.devices[0]
    assert len(device.times_s) > len(kept) / 3
    for record in (device, Branch("x", 300, 300, (Branch("line 1", 1, 1),) * 300)):
        assert repr(record).startswith(f"{type(record).__name__}(")
        assert len(repr(record)) < 600
