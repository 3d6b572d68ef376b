"""The command line, ``tenure`` and ``python -m tenure``: a verb, its exit code, errors in one line.

Invariant: nothing here imports torch before a verb runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

import tenure
from tenure._errors import CommandError, TenureError

_USER_ERROR = 2
_INTERRUPTED = 130
_TRACEBACK = "TENURE_TRACEBACK"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb of the command line.

    Args:
        argv: the arguments after the name of the program; None reads them from ``sys.argv``.

    Returns:
        The exit code: 0, or 2 for a mistake of the user and for any other error of tenure, told in
        one line; with ``TENURE_TRACEBACK=1`` in the environment the latter shows where as well.

    Raises:
        SystemExit: after ``--help`` and ``--version``, and for arguments that can't be parsed.
    """
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except TenureError as error:
        _tell(arguments.verb, error)
        return _USER_ERROR
    except KeyboardInterrupt:
        print("tenure: interrupted", file=sys.stderr)
        return _INTERRUPTED


def _tell(verb: str, error: TenureError) -> None:
    """Print an error in one line, as scripts and logs expect of a command."""
    hint = ""
    if not isinstance(error, CommandError):
        if os.environ.get(_TRACEBACK, "0") not in {"", "0"}:
            traceback.print_exception(error)
        else:
            hint = f" ({type(error).__name__}; {_TRACEBACK}=1 shows where.)"
    print(f"tenure {verb}: error: {' '.join(str(error).split())}{hint}", file=sys.stderr)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(_USER_ERROR, f"{self.prog}: error: {message}. See {self.prog} --help.\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="tenure", description="Deterministic tensor lifetimes for PyTorch.")
    parser.add_argument("--version", action="version", version=f"tenure {tenure.__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    text = inspect.getdoc(_demo) or ""
    demo = verbs.add_parser(
        "demo",
        help=text.partition("\n")[0],
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    demo.add_argument("--quick", action="store_true", help="a smaller model and fewer steps")
    demo.add_argument(
        "--steps",
        type=_whole_number(1),
        metavar="N",
        help="steps of the first chapter (default: 300; with --quick 40)",
    )
    demo.add_argument(
        "--seed",
        type=_whole_number(0),
        default=0,
        metavar="N",
        help="of the weights and of the batches (default: 0)",
    )
    demo.set_defaults(run=_demo)
    return parser


def _whole_number(minimum: int, maximum: int = 2**64 - 1) -> Callable[[str], int]:
    """A ``type`` for argparse: a whole number from ``minimum`` to ``maximum``."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {minimum}")
        if int(text) > maximum:
            raise argparse.ArgumentTypeError(f"{text!r} is above {maximum}")
        return int(text)

    return parse


def _demo(arguments: argparse.Namespace) -> int:
    """Train a small transformer in scopes, with a leak planted in its loop.

    The text is the source of Python's own standard library, character by character. Five chapters:
    the loss going down; the live bytes of the same steps without scopes and with them; the report
    that names the list which holds what leaked; training in too little memory for its batch; and
    running the model in too little memory for its weights. Needs no network and no accelerator.
    """
    from tenure._demo import FULL, QUICK, tell

    settings = QUICK if arguments.quick else FULL
    tell(settings.replace(steps=arguments.steps or settings.steps, seed=arguments.seed))
    return 0
