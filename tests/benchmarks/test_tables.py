import json
import re
from pathlib import Path

import pytest

from benchmarks._figure import drawn
from benchmarks.tables import (
    FIGURE,
    RESULTS,
    ROOT,
    TableError,
    pages,
    rendered,
    sections_of,
    without_tables,
)

from .quoted import NOT_MEASURED, QUOTED

_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_QUANTITY = re.compile(
    r"(?<![\w.,-])(\d[\d,]*(?:\.\d+)?\s(?:ms|µs|us|ns|s|[KMG]i?B/s)|\d+\.\d+ times)(?![\w/])"
)
_NUMBER = re.compile(r"(\d[\d,]*(?:\.\d+)?)(?: (ms|µs|us|ns|s)\b)?")
_PROSE = [ROOT / "README.md", *pages()]


def _quantities(page):
    """What a page says in prose and tables of its own, without code."""
    written = without_tables(page.read_text())
    text = re.sub(r"(?ms)^```.*?^```", "", written)
    text = re.sub(r"`[^`\n]*`", "", text)
    return {" ".join(found.split()) for found in _QUANTITY.findall(text)}


def _is_quote(quantity, row):
    """Whether a number of the row, rounded as the quantity is, is the quantity."""
    number, _, unit = quantity.partition(" ")
    digits = len(number.partition(".")[2])
    for text, its_unit in _NUMBER.findall(f"{row['what']} {row['value']} {row['note']}"):
        found = float(text.replace(",", ""))
        if unit in _UNITS:
            if not its_unit:
                continue
            found *= _UNITS[its_unit] / _UNITS[unit]
        if f"{found:.{digits}f}" == number.replace(",", ""):
            return True
    return False


def _rows_of_checks(checks):
    """The figures of a run on a GPU, with the units that end their names."""
    units = {"_us": "µs", "_ms": "ms", "_gb_per_s": "GB/s"}
    for check in checks:
        for name, value in check.get("figures", {}).items():
            unit = next((unit for end, unit in units.items() if name.endswith(end)), "")
            yield {"what": f"{check['name']}: {name}", "value": f"{value} {unit}", "note": ""}


def _key(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_tables_are_what_the_results_give(page):
    assert rendered(page.read_text()) == page.read_text(), "run: python -m benchmarks.tables"


def test_the_figure_is_what_the_results_give():
    assert drawn(RESULTS) == FIGURE.read_text(), "run: python -m benchmarks.tables"
    assert FIGURE.name in (ROOT / "docs" / "performance.md").read_text()


def test_the_figure_draws_other_results_otherwise(tmp_path):
    for path in RESULTS.glob("*.json"):
        text = path.read_text()
        (tmp_path / path.name).write_text(text.replace('"value": "0.249"', '"value": "0.777"'))
    before, after = drawn(RESULTS).splitlines(), drawn(tmp_path).splitlines()
    changed = [line for line, was in zip(after, before, strict=True) if line != was]
    assert [("0.78" in line or 'width="186.5"' in line) for line in changed] == [True, True]


def test_the_figure_names_a_row_that_is_gone(tmp_path):
    with pytest.raises(
        LookupError, match=r"in a scope / plain: ResNet-18', and scopes\.json has no"
    ):
        drawn(tmp_path)


def _reports():
    """Results with rows; other files have single steps or verdicts, for who wants to look."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    return {name: told for name, told in found.items() if isinstance(told, dict) and "rows" in told}


def test_every_result_has_a_table():
    shown = [name for page in pages() for name in sections_of(page.read_text())]
    assert sorted(shown) == sorted(_reports())


_BENCHMARKS = {name: each for name, each in _reports().items() if "columns" not in each}


@pytest.mark.parametrize("report", _BENCHMARKS.values(), ids=_BENCHMARKS)
def test_results_say_what_machine_torch_and_commit_they_are_of(report):
    assert {"CPU", "threads", "Python", "torch", "commit"} <= set(report["machine"])
    assert all({"what", "value", "bar", "reached", "note"} == set(row) for row in report["rows"])


@pytest.mark.parametrize("page", _PROSE, ids=lambda page: page.stem)
def test_a_measured_number_of_a_page_has_a_source(page):
    known = {quantity for name, quantity in QUOTED if name == _key(page)}
    settings = NOT_MEASURED.get(_key(page), set())
    unknown = _quantities(page) - known - settings
    assert not unknown, (
        f"{_key(page)} quotes {sorted(unknown)}: say in tests/benchmarks/quoted.py which row of "
        "benchmarks/results that is, or that nobody measured it; or leave the number out."
    )


@pytest.mark.parametrize(("page", "quantity"), QUOTED)
def test_a_quoted_number_is_that_of_its_row(page, quantity):
    results, what = QUOTED[page, quantity]
    report = json.loads((RESULTS / f"{results}.json").read_text())
    rows = report["rows"] if "rows" in report else _rows_of_checks(report["checks"])
    (row,) = [row for row in rows if row["what"] == what]
    assert quantity in _quantities(ROOT / page)
    assert _is_quote(quantity, row), f"{row} has no {quantity}"


def test_numbers_that_nobody_quotes_any_more_are_taken_off_the_list():
    for page, quantities in NOT_MEASURED.items():
        assert quantities <= _quantities(ROOT / page)


def test_a_number_is_a_quote_only_where_it_rounds_to_it():
    row = {"what": "a", "value": "1.169", "note": "5.96 ms each"}
    assert _is_quote("1.17 times", row)
    assert _is_quote("6 ms", row)
    assert _is_quote("0.006 s", row)
    assert not _is_quote("1.16 times", row)
    assert not _is_quote("1 ms", row)
    assert not _is_quote("6 s", row)


def _results(tmp_path, value):
    row = {"what": "a thing", "value": value, "bar": "<= 2", "reached": False, "note": "some"}
    report = {"machine": {"CPU": "X", "torch": "2"}, "rows": [row]}
    (tmp_path / "things.json").write_text(json.dumps(report))
    return Path(tmp_path)


def test_a_stale_table_is_written_anew_and_the_words_around_it_stay(tmp_path):
    page = "before\n<!-- things: begin -->\nstale\n<!-- things: end -->\nafter\n"
    assert rendered(page, _results(tmp_path, "3")) == (
        "before\n<!-- things: begin -->\nCPU X, torch 2.\n\n"
        "| what | measured | bar | reached | |\n|---|---|---|---|---|\n"
        "| a thing | 3 | <= 2 | no | some |\n<!-- things: end -->\nafter\n"
    )


def test_a_table_with_columns_of_its_own_shows_those_of_each_row(tmp_path):
    report = {"columns": ["torch", "passed"], "rows": [{"passed": 3, "torch": "2.15.0", "x": 1}]}
    (tmp_path / "pairs.json").write_text(json.dumps(report))
    assert rendered("<!-- pairs: begin -->\n<!-- pairs: end -->\n", tmp_path) == (
        "<!-- pairs: begin -->\n"
        "| torch | passed |\n| --- | --- |\n| 2.15.0 | 3 |\n"
        "<!-- pairs: end -->\n"
    )


def test_a_table_without_results_says_what_to_do(tmp_path):
    with pytest.raises(TableError, match=r"'others' has no others\.json .* run its benchmark"):
        rendered("<!-- others: begin -->\n<!-- others: end -->\n", tmp_path)


def test_a_marker_that_stands_alone_is_refused(tmp_path):
    with pytest.raises(TableError, match=r"'things'.* no other"):
        rendered("<!-- things: begin -->\n", _results(tmp_path, "3"))
