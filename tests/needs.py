"""Marks that skip a test if this version of torch lacks what it needs."""

import pytest
import torch


def needs_torch(version, what):
    """Return a mark that skips a test of something that torch has only from a version on."""
    return pytest.mark.skipif(torch.__version__ < version, reason=f"needs torch {version}: {what}")
