"""What is known of IPython: cells, what their lines are called, code run as one, magics, errors.

It is asked only where the program itself has imported it: one that has not has no cells.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

# IPython 8 calls the code of a cell by its line
_OWN_NAMES = ("<module>", "<cell line: ")
_KINDS = ("line", "cell")
_SHELL = "InteractiveShell."


def cell_of(path: str) -> str | None:
    """What IPython calls the cell that was compiled under this path, as ``Cell In[2]``.

    None where it is no cell's: a notebook's are temporary files that are never written, a
    terminal's are ``<ipython-input-2-1f3b...>``.
    """
    # whoever runs a cell has imported it; that of no shell is asked for none
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", _no_shell)()
    named = None if shell is None else shell.compile.format_code_name(path)
    return " ".join(named) if named else None


def is_cell(code: CodeType) -> bool:
    """Whether this is a cell itself, and no function in it: what calls it is the notebook's."""
    return code.co_name.startswith(_OWN_NAMES) and cell_of(code.co_filename) is not None


def is_of_shell(holder: str) -> bool:
    """Whether a holder is a variable of the notebook's own, as of the value of a cell.

    The user knows that as ``_``.
    """
    return holder.startswith(_SHELL)


def usage_error(text: str) -> Exception:
    """The error that IPython shows as its text alone."""
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
    """Whether no semicolon follows, by which a cell keeps its value to itself."""
    line, column = (node.end_lineno or 1) - 1, node.end_col_offset or 0
    # columns count bytes
    rest = source.split("\n")[line].encode()[column:]
    return not rest.lstrip().startswith(b";")


class Expression:
    """An expression for an object that the code of a cell may define only when it runs.

    Attributes:
        text: as it was written.
        is_known: whether it has had a value.
        missing: what was not found when it was last asked for.

    Raises:
        SyntaxError: it is none.
    """

    def __init__(self, text: str, shell: Any) -> None:
        self.text = text
        self.is_known = False
        self.missing = ""
        self._shell = shell
        tree = ast.parse(text, mode="eval")
        self._code = compile(tree, "<expression>", "eval")
        # A name may be bound again by the code; what has to be computed is computed once.
        self._is_name = _is_dotted_name(tree.body)

    def value(self) -> Any:
        """The object, or None as long as the names in the expression are not there."""
        if self.is_known and not self._is_name:
            return None
        try:
            found = eval(self._code, self._shell.user_global_ns, self._shell.user_ns)
        except (NameError, AttributeError) as error:
            self.missing = str(error)
            return None
        self.is_known = True
        return found


def _is_dotted_name(node: ast.expr) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)


# --- magics


def add_magic(shell: Any, name: str, function: Callable[..., Any], kind: str) -> None:
    """Add a magic whose braces are its own, with the help of ``function``.

    Args:
        shell: the ``InteractiveShell``.
        name: without its percent signs.
        function: takes the shell, the line, and of a cell its code.
        kind: ``"cell"``, or ``"line_cell"``.
    """
    from IPython.core.magic import no_var_expand

    @no_var_expand
    def magic(line: str, cell: str | None = None) -> Any:
        return function(shell, line) if cell is None else function(shell, line, cell)

    # for `%name?`
    magic.__doc__ = function.__doc__
    known = shell.magics_manager.magics
    magic.before = {each: known[each].get(name) for each in _KINDS}  # type: ignore[attr-defined]
    shell.register_magic_function(magic, kind, name)


def remove_magic(shell: Any, name: str) -> None:
    """Take away what `add_magic` added; what had the name before is there again.

    Where somebody else has taken the name since, it stays theirs.
    """
    for kind in _KINDS:
        known = shell.magics_manager.magics[kind]
        before = getattr(known.get(name), "before", None)
        if before is None:
            continue
        del known[name]
        if before[kind] is not None:
            known[name] = before[kind]
