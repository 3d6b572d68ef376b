"""The page for users is a file of tests, whose blocks run here."""

import re
from pathlib import Path

import pytest

_DOCS = Path(__file__).parents[2] / "docs"
pytestmark = pytest.mark.simdevice

_BLOCKS = re.findall(r"```python\n(.*?)```", (_DOCS / "testing.md").read_text(), re.DOTALL)
assert any("def test_" in block for block in _BLOCKS)
exec("\n\n".join(_BLOCKS))


def test_the_page_names_every_figure_that_it_lists(sim):
    listed = re.findall(
        r"`(?:sim\.)?(\w+_bytes|\w+_count|elapsed_s|host_waits|faults)`",
        (_DOCS / "simulated-device.md").read_text(),
    )
    assert {"peak_bytes", "elapsed_s", "faults"} <= set(listed)
    assert all(hasattr(sim, name) for name in listed)
