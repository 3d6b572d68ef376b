"""The command line: ``tenure`` and ``python -m tenure``.

One class per verb, whose docstring is its help. Nothing here imports torch before a verb runs, so
that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Sequence
from typing import NoReturn

import tenure

from ._demo import Demo
from ._verb import CommandError as CommandError
from ._verb import Verb as Verb

_VERBS: tuple[type[Verb], ...] = (Demo,)
_USER_ERROR = 2
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb of the command line.

    Args:
        argv: the arguments after the name of the program; None reads them from ``sys.argv``.

    Returns:
        The exit code: 0, or 2 for a mistake of the user, told in one line.

    Raises:
        SystemExit: after ``--help`` and ``--version``, and for arguments that can't be parsed.
    """
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except CommandError as error:
        print(f"tenure {arguments.verb}: error: {error}", file=sys.stderr)
        return _USER_ERROR
    except KeyboardInterrupt:
        print("tenure: interrupted", file=sys.stderr)
        return _INTERRUPTED


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(_USER_ERROR, f"{self.prog}: error: {message}. See {self.prog} --help.\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="tenure", description="Deterministic tensor lifetimes for PyTorch.")
    parser.add_argument("--version", action="version", version=f"tenure {tenure.__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb in _VERBS:
        _add_verb(verbs, verb)
    return parser


def _add_verb(verbs: argparse._SubParsersAction[_Parser], verb: type[Verb]) -> None:
    text = inspect.getdoc(verb) or ""
    parser = verbs.add_parser(
        verb.__name__.lower(),
        help=text.partition("\n")[0],
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_arguments(parser)
    parser.set_defaults(run=verb.run)
