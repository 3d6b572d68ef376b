"""Long tables of names, written as a text: one in quotes each would take a line each."""

from __future__ import annotations


def names(text: str) -> list[str]:
    """The names in a text, which white space separates."""
    return text.split()
