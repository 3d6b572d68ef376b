"""What the integrations import, and say if a library is missing."""

import pytest

from tests.programs import run_program

_PROGRAM = """
import sys
from importlib import import_module
import tenure.integrations
libraries = ("torch", "transformers", "accelerate", "lightning", "pytorch_lightning")
assert not sys.modules.keys() & {*libraries}
from tenure.integrations import accelerate, lightning
assert not sys.modules.keys() & {*libraries[1:]}
del sys.modules["tenure.integrations.lightning"]
sys.modules |= dict.fromkeys(libraries[1:])
for name in ("lightning", "transformers"):
    try:
        import_module(f"tenure.integrations.{name}")
    except ImportError as error:
        print(error)
"""


@pytest.mark.slow
def test_libraries_are_imported_by_who_uses_them_and_a_missing_one_is_named():
    done = run_program(_PROGRAM)
    assert done.returncode == 0, done.stderr
    assert 'pip install "lightning>=2.4"' in done.stdout
    assert 'pip install "transformers>=4.50" "accelerate>=1.0"' in done.stdout
