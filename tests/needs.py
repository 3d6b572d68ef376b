"""What only some versions of torch have, as the reason why a test is skipped."""

import pytest
import torch


def needs_torch(version, what):
    """A mark of tests that use something that torch has from a version on."""
    return pytest.mark.skipif(torch.__version__ < version, reason=f"needs torch {version}: {what}")
