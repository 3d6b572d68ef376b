"""The command line, ``tenure`` and ``python -m tenure``."""

from ._main import main as main
