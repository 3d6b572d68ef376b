"""The list of planted faults fits the code. Whether tests notice them, its own program says."""

from pathlib import Path

import tenure

from .planted_faults import FAULTS

_ROOT = Path(tenure.__file__).parent


def test_each_line_that_is_changed_stands_once_in_its_file_and_the_tests_are_there():
    texts = {fault.file: (_ROOT / fault.file).read_text("utf-8") for fault in FAULTS}
    wrong = [fault for fault in FAULTS if texts[fault.file].count(fault.line) != 1]
    assert wrong == []
    assert [f for f in FAULTS if not (Path(__file__).parent / f.tests).exists()] == []


def test_there_are_sixty_faults_in_all_packages():
    packages = {path.parent.name for path in _ROOT.glob("*/__init__.py")}
    assert len(set(FAULTS)) >= 60
    assert {fault.file.partition("/")[0] for fault in FAULTS} >= packages - {"_demo"}
