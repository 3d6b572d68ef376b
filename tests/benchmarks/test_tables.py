import json
import re
from pathlib import Path

import pytest

from benchmarks._figure import drawn
from benchmarks.bench_reports import _CASES
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
from tests.profiler.owners import saved_cases

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


def test_a_stale_table_is_written_anew_and_the_words_around_it_stay(tmp_path):
    row = {"what": "a thing", "value": "3", "bar": "<= 2", "reached": False, "note": "some"}
    report = {"machine": {"CPU": "X", "torch": "2"}, "rows": [row]}
    (tmp_path / "things.json").write_text(json.dumps(report))
    page = "before\n<!-- things: begin -->\nstale\n<!-- things: end -->\nafter\n"
    assert rendered(page, tmp_path) == (
        "before\n<!-- things: begin -->\nCPU X, torch 2.\n\n"
        "| what | measured | bar | reached | |\n|---|---|---|---|---|\n"
        "| a thing | 3 | <= 2 | no | some |\n<!-- things: end -->\nafter\n"
    )
    with pytest.raises(TableError, match=r"'others' has no others\.json .* run its benchmark"):
        rendered("<!-- others: begin -->\n<!-- others: end -->\n", tmp_path)
    with pytest.raises(TableError, match=r"'things'.* no other"):
        rendered("<!-- things: begin -->\n", tmp_path)


def test_the_cases_that_are_measured_are_those_that_are_tested():
    assert Path(saved_cases.__file__) == _CASES
