"""What is known of IPython: cells, what their lines are called, code run as one, magics, errors.

It is asked only where the program itself has imported it: one that has not has no cells.
"""

from __future__ import annotations

import argparse
import ast
import keyword
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import CodeType
from typing import Any, NoReturn

# IPython 8 calls the code of a cell by its line
_OWN_NAMES = ("<module>", "<cell line: ")
_SHELL = "InteractiveShell."


def cell_of(path: str) -> str | None:
    """Return IPython's name of the cell that was compiled under this path: ``Cell In[2]``.

    None where it is no cell's: a notebook's are temporary files that are never written, a
    terminal's are ``<ipython-input-2-1f3b...>``.
    """
    # whoever runs a cell has imported it; that of no shell is asked for none
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", _no_shell)()
    named = None if shell is None else shell.compile.format_code_name(path)
    return " ".join(named) if named else None


def is_cell(code: CodeType) -> bool:
    """Return whether this is a cell itself, not a function in it; the notebook calls it."""
    return code.co_name.startswith(_OWN_NAMES) and cell_of(code.co_filename) is not None


def is_of_shell(holder: str) -> bool:
    """Return whether a holder is a variable of the notebook's own, as of the value of a cell.

    The user knows that as ``_``.
    """
    return holder.startswith(_SHELL)


def usage_error(text: str) -> Exception:
    """Return the error that IPython shows as its text alone."""
    from IPython.core.error import UsageError

    return UsageError(text)


def _no_shell() -> None:
    pass


def run_cell(shell: Any, code: str, before_each: Callable[[], object] = lambda: None) -> None:
    """Run code as a cell of its own, in the variables of the user; its errors go on.

    Args:
        shell: the ``InteractiveShell``.
        code: as it stands in the cell, magics and all; its first line is line 1.
        before_each: is called before each statement.
    """
    # which takes empty lines above away, such as stand for a magic: lines count as they are seen
    above = code[: len(code) - len(code.lstrip())].count("\n")
    source = "\n" * above + shell.transform_cell(code)
    # the number in front of what it shows: whether the count goes up before a cell or after it is
    # another matter in each version
    file = shell.compile.cache(source, shell.displayhook.prompt_count, raw_code=code)
    tree = shell.transform_ast(shell.compile.ast_parse(source, filename=file))
    for node in tree.body:
        before_each()
        is_shown = node is tree.body[-1] and isinstance(node, ast.Expr) and _is_open(node, source)
        piece = ast.Interactive([node]) if is_shown else ast.Module([node], [])
        compiled = shell.compile(piece, file, "single" if is_shown else "exec")
        exec(compiled, shell.user_global_ns, shell.user_ns)


def _is_open(node: ast.stmt, source: str) -> bool:
    """Return whether no semicolon follows, by which a cell keeps its value to itself."""
    line, column = (node.end_lineno or 1) - 1, node.end_col_offset or 0
    # columns count bytes
    rest = source.split("\n")[line].encode()[column:]
    return not rest.lstrip().startswith(b";")


class Named:
    """The functions that a magic names; the code of its cell may define them when it runs.

    Attributes:
        missing: why a name had no value when it was last looked up, of those that never had one.

    Args:
        names: such as ``Net.forward``.
        shell: the ``InteractiveShell``.
        option: the option of the magic that names them.

    Raises:
        UsageError: one is an expression of another kind.
    """

    def __init__(self, names: Sequence[str], shell: Any, option: str) -> None:
        for name in names:
            parts = name.split(".")
            if not all(part.isidentifier() and not keyword.iskeyword(part) for part in parts):
                raise usage_error(
                    f"{option} {name}: not a name, such as func or Net.forward. Assign what you "
                    "mean to a variable, and name that."
                )
        self.missing = dict.fromkeys(names, "")
        self._names = names
        self._shell = shell

    def add_to(self, profiler: Any) -> None:
        """Profile those that are there by now; one that is bound again is one more."""
        for name in self._names:
            try:
                function = eval(name, self._shell.user_global_ns, self._shell.user_ns)
            except (NameError, AttributeError) as error:
                if name in self.missing:
                    self.missing[name] = str(error)
            else:
                self.missing.pop(name, None)
                profiler.add_function(function)


# --- magics


class MagicParser(argparse.ArgumentParser):
    """The options of a magic, whose help is its docstring.

    Args:
        magic: its name, with its percent signs.
    """

    def __init__(self, magic: str) -> None:
        super().__init__(prog=magic, add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Show the text alone."""
        raise usage_error(f"{self.prog}: {message}. See {self.prog}? for what there is.")


def add_magic(shell: Any, name: str, function: Callable[..., Any], kind: str) -> None:
    """Add a magic whose braces are its own, with the help of ``function``.

    Args:
        shell: the ``InteractiveShell``.
        name: without its percent signs.
        function: takes the shell, the line, and of a cell its code.
        kind: ``"cell"``, or ``"line_cell"``.
    """
    from IPython.core.magic import no_var_expand

    magic: Any = no_var_expand(partial(function, shell))
    # for `%name?`
    magic.__doc__ = function.__doc__
    shell.register_magic_function(magic, kind, name)


def remove_magic(shell: Any, name: str) -> None:
    """Take away what `add_magic` added."""
    for kind in ("line", "cell"):
        shell.magics_manager.magics[kind].pop(name, None)
