"""The page for developers names files and packages; each is there, and no package is missing."""

import re
from pathlib import Path

import pytest

import tenure

_ROOT = Path(tenure.__file__).parent
_PAGE = _ROOT.parent / "docs" / "architecture.md"
pytestmark = pytest.mark.skipif(not _PAGE.exists(), reason="runs where the docs are")


def _files_in(page):
    return set(re.findall(r"`((?:tenure|tests|benchmarks)/[\w/.]+)`", page.read_text("utf-8")))


@pytest.mark.parametrize("page", [_PAGE, _ROOT.parent / "CONTRIBUTING.md"], ids=lambda p: p.name)
def test_each_file_and_package_it_names_is_there(page):
    assert {name for name in _files_in(page) if not (_ROOT.parent / name).exists()} == set()


@pytest.mark.parametrize("room", ["adaptive", "profiler", "paging", "testing"])
def test_each_package_of_a_room_has_its_line(room):
    rows = set(re.findall(r"^\| `(_\w+)` \|", _PAGE.read_text("utf-8"), re.MULTILINE))
    assert {path.parent.name for path in (_ROOT / room).glob("*/__init__.py")} <= rows


def test_each_package_is_named_however_deep_it_lies():
    text = _PAGE.read_text("utf-8")
    names = {path.parent.name for path in _ROOT.glob("*/**/__init__.py")}
    assert {name for name in names if not re.search(f"`{name}`|/{name}/", text)} == set()


def test_each_module_of_the_ground_has_its_line():
    ground = {path.name for path in _ROOT.glob("_*.py")} - {"__init__.py", "__main__.py"}
    assert {f"tenure/{name}" for name in ground} <= _files_in(_PAGE)


def _rules_of_notes():
    """How many rules each note of the page has."""
    parts = re.split(r"^##+ ", _PAGE.read_text("utf-8"), flags=re.MULTILINE)
    notes = (re.match(r"Note \[(.+)\]\n", part) for part in parts)
    numbered = (re.findall(r"^(\d+)\. ", part, re.MULTILINE) for part in parts)
    return {note[1]: numbers for note, numbers in zip(notes, numbered, strict=True) if note}


def test_each_rule_that_code_cites_is_on_the_page_and_each_note_is_cited():
    rules = _rules_of_notes()
    assert len(rules) == 6
    assert all(numbers == [str(n + 1) for n in range(len(numbers))] for numbers in rules.values())
    texts = (path.read_text("utf-8") for path in _ROOT.rglob("*.py"))
    # a citation may go over the end of a line of comment
    plain = (re.sub(r"\s+(?:# )?", " ", text) for text in texts)
    cited = [c for text in plain for c in re.findall(r"Note \[(.+?)\], rules? (\d+)", text)]
    assert {name for name, _ in cited} == set(rules)
    assert [c for c in cited if c[1] not in rules[c[0]]] == []


def test_no_test_runs_only_where_the_simulated_device_does_not():
    """LIBRARY_TESTS of the Makefile have no line with it: what asks for it would not run."""
    makefile = (_ROOT.parent / "Makefile").read_text("utf-8").replace("\\\n", " ")
    (files,) = re.findall(r"^LIBRARY_TESTS := (.*)$", makefile, re.MULTILINE)
    texts = {name: (_ROOT.parent / name).read_text("utf-8") for name in files.split()}
    assert len(texts) >= 4
    assert [name for name, text in texts.items() if re.search(r"\bsim\b", text)] == []
