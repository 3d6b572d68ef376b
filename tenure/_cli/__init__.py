"""The command line, ``tenure`` and ``python -m tenure``; ``_cell`` stands for it in a notebook."""

from ._main import main as main
