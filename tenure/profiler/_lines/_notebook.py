"""The magics of IPython and notebooks: ``%load_ext tenure``, then ``%mlrun`` and ``%%mlrun``.

IPython is imported when the extension is loaded, and not before.
"""

from __future__ import annotations

from typing import Any


def load_ipython_extension(shell: Any) -> None:
    """Add ``%mlrun`` and ``%%mlrun`` to a shell; IPython calls this for ``%load_ext tenure``.

    Args:
        shell: the ``InteractiveShell``.
    """
    from ._mlrun import mlrun

    shell.register_magic_function(_bound(mlrun, shell), "line_cell", "mlrun")


def _bound(mlrun: Any, shell: Any) -> Any:
    from IPython.core.magic import no_var_expand

    @no_var_expand  # braces in the statement are its own
    def magic(line: str, cell: str | None = None) -> Any:
        return mlrun(shell, line, cell)

    magic.__doc__ = mlrun.__doc__
    return magic
