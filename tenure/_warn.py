"""Warnings that point at the user's line, however deep inside tenure they are raised."""

from __future__ import annotations

import sys
import warnings

from tenure._errors import TenureWarning

_NOT_OF_USERS = ("tenure.", "torch.")


def warn_user(message: str, category: type[TenureWarning]) -> None:
    """Warn, with the place of the innermost frame outside of tenure, and of torch, its caller."""
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(_NOT_OF_USERS):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
