import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "simulated-device.md"


@pytest.mark.exhaustive
@pytest.mark.simdevice
def test_the_page_for_users_is_a_file_of_tests_that_passes(tmp_path):
    page = (DOCS / "testing.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "test_page.py").write_text("\n\n".join(blocks), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider"]
    # options from outside may change what is printed
    own = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, env=own
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d+ passed", done.stdout.splitlines()[-1])


def test_the_page_names_every_figure_that_it_lists(sim):
    listed = re.findall(
        r"`(?:sim\.)?(\w+_bytes|\w+_count|elapsed_s|host_waits|faults)`", PAGE.read_text()
    )
    assert {"peak_bytes", "elapsed_s", "faults"} <= set(listed)
    assert all(hasattr(sim, name) for name in listed)
