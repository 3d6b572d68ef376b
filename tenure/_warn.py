"""Warnings that point at the user's line, however deep inside tenure they are raised."""

from __future__ import annotations

import sys
import warnings

from tenure._errors import TenureWarning
from tenure._frames import is_internal


def warn_user(message: str, category: type[TenureWarning]) -> None:
    """Warn, with the place of the innermost frame that is the user's."""
    level, frame = 1, sys._getframe()
    while frame.f_back and is_internal(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
