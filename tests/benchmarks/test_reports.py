from pathlib import Path

from benchmarks.bench_reports import _CASES
from tests.profiler.owners import saved_cases


def test_the_cases_that_are_measured_are_those_that_are_tested():
    assert Path(saved_cases.__file__) == _CASES
