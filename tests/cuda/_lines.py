"""The line that is printed for each check: its name, whether it held, and what it saw."""

from typing import Any

import torch

_HERE = "tests/cuda/"
_STATES = {"passed": "ok", "failed": "FAILED"}


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print a line a check on a GPU; with -v those of the rehearsal too."""
    lines = [
        f"{said:6}  {_name(report)}: {dict(report.user_properties).get('seen', '-')}"
        for state, said in _STATES.items()
        for report in terminalreporter.stats.get(state, [])
        if _HERE in report.nodeid and _is_shown(report, terminalreporter)
    ]
    skipped = terminalreporter.stats.get("skipped", [])
    if not torch.cuda.is_available() and any(_is_on_gpu(report) for report in skipped):
        # a run that has skipped all ends in green
        lines.append(f"nothing was verified: no CUDA device (this PyTorch is {torch.__version__})")
    if lines:
        terminalreporter.section("checks on a GPU")
        for line in lines:
            terminalreporter.write_line(line)


def _is_shown(report: Any, terminalreporter: Any) -> bool:
    return report.when == "call" and (_is_on_gpu(report) or terminalreporter.verbosity > 0)


def _is_on_gpu(report: Any) -> bool:
    on_gpu = report.nodeid.endswith("[cuda]") or "[cuda-" in report.nodeid
    return _HERE in report.nodeid and on_gpu


def _name(report: Any) -> str:
    return report.nodeid.rpartition("::")[2].removeprefix("test_").replace("_", " ")
