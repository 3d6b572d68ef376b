"""Silence for a logger whose words the demo prints itself."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def silent(name: str) -> Iterator[None]:
    """Let a logger, and those above it, print nothing."""
    logger = logging.getLogger(name)
    nowhere = logging.NullHandler()
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(nowhere)
    try:
        yield
    finally:
        logger.removeHandler(nowhere)
        logger.propagate = propagate
