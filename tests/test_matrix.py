import json

from . import matrix

_METADATA = """Name: torch
Requires-Dist: sympy>=1.13.3
Requires-Dist: cuda-toolkit[cublas,cusolver,cusparse,nvtx]==13.2.2; platform_system == "Linux"
Requires-Dist: nvidia-cusolver-cu12==11.7.3.90; platform_system == "Linux"
Requires-Dist: nvidia-cudnn-cu13==9.26.0.51; platform_system == "Linux"
Requires-Dist: triton~=3.9.0; platform_system == "Linux"
"""


def test_a_torch_asks_for_what_its_import_needs():
    assert matrix.without_gpu(_METADATA).splitlines() == [
        "Name: torch",
        "Requires-Dist: sympy>=1.13.3",
        'Requires-Dist: cuda-toolkit[cublas,cusparse]==13.2.2; platform_system == "Linux"',
        'Requires-Dist: nvidia-cudnn-cu13==9.26.0.51; platform_system == "Linux"',
        'Requires-Dist: triton~=3.9.0; platform_system == "Linux"',
    ]


def test_runs_are_added_up_and_one_that_breaks_off_is_a_failure():
    printed = [
        "FAILED tests/test_x.py::test_3_passed in 2.0s\n",
        "= 1 failed, 20 passed, 3 skipped in 2.50s =\n",
        "make: [Makefile:51: test] Error 1 (ignored)\n",
        "====== 7 passed, 2 warnings, 1 error in 100.21s (0:01:40) ======\n",
        "make[1]: [Makefile:52: test] Error 3 (ignored)\n",
    ]
    assert matrix.counted(printed) == {"passed": 27, "failed": 3, "skipped": 3}


def test_a_row_takes_the_place_of_the_one_before_it(tmp_path, monkeypatch):
    monkeypatch.setattr(matrix, "RESULTS", tmp_path / "matrix.json")
    pairs = [("3.11", "2.10.0"), ("3.11", "2.9.1"), ("3.9", "2.15.0"), ("3.11", "2.9.1")]
    for i, (python, torch) in enumerate(pairs):
        matrix.keep({"Python": python, "torch": torch, "passed": i})
    kept = json.loads(matrix.RESULTS.read_text())["rows"]
    assert [(row["torch"], row["passed"]) for row in kept] == [
        ("2.15.0", 2),
        ("2.9.1", 3),
        ("2.10.0", 0),
    ]
