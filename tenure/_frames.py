"""Whose code a frame runs: the user's, or that of tenure and of what calls it for the user."""

from __future__ import annotations

from types import FrameType

_OWN_PACKAGE = __name__.partition(".")[0]
_COMMAND_LINE = f"{_OWN_PACKAGE}._cli"
_INTERNAL = frozenset({_OWN_PACKAGE, "torch", "contextlib"})


def module_of(frame: FrameType) -> str:
    """The name of the module whose code ``frame`` runs; "" where ``exec`` was given another."""
    name = frame.f_globals.get("__name__")
    return name if isinstance(name, str) else ""


def is_internal(frame: FrameType) -> bool:
    """Whether ``frame`` is tenure's, torch's or contextlib's."""
    name = module_of(frame)
    if name.startswith(_COMMAND_LINE):  # it uses the library like any program
        return False
    return name.partition(".")[0] in _INTERNAL
