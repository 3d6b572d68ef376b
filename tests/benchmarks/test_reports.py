import json

import pytest

from benchmarks.bench_reports import _CASES
from tests.programs import run_program


@pytest.mark.slow
def test_the_cases_that_are_measured_are_there_and_tell_their_truth():
    done = run_program(_CASES)
    assert done.returncode == 0, done.stderr
    cases = json.loads(done.stdout.splitlines()[-1])
    assert any(case["truth"] for case in cases.values())
