"""A verb of the command line, its exit code, errors in one line.

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
from tenure._visible import in_one_line, visible

from ._fit import Fit
from ._recordings import Diff, Export, LeaksVerb, ReportVerb, Tree
from ._run import Run
from ._verb import Verb


class Demo(Verb):
    """Show in about a minute how tenure names a leak, fits a batch, and fits a model.

    A small network learns from the source of PyTorch. Each chapter shows its code and its result.
    The last chapter leaves files of `tenure run` for you to look at. The demo needs
    no network connection and no accelerator.
    """

    name = "demo"
    options = "--quick  a smaller model and fewer steps"

    def run(self, arguments: argparse.Namespace) -> int:
        """Tell the story."""
        from tenure._demo import tell

        tell(quick=arguments.quick)
        return 0


_VERBS = (Demo, Run, ReportVerb, Tree, LeaksVerb, Diff, Export, Fit)
_USER_ERROR = 2
_INTERRUPTED = 130
# what a shell says of a program that the signal for it has ended
_PIPE_CLOSED = 141
_TRACEBACK = "TENURE_TRACEBACK"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb of the command line.

    Args:
        argv: the arguments after the name of the program; None reads them from ``sys.argv``.

    Returns:
        The exit code: that of the verb; 0 without one, after the help; 2 for a mistake of the user
        and for any other error of tenure, told in one line; with ``TENURE_TRACEBACK=1`` in the
        environment the latter shows where as well.

    Raises:
        SystemExit: after ``--help`` and ``--version``, and for arguments that can't be parsed.
    """
    parser, verbs = _parser()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        # argparse would name the help of all verbs, which does not list the options of this one
        verbs.get(arguments.verb, parser).error(f"unrecognized arguments: {' '.join(unknown)}")
    if arguments.verb is None:
        parser.print_help()
        return 0
    try:
        done: int | Callable[[], int] = arguments.run(arguments)
    except (TenureError, ImportError) as error:
        # tenure refuses this torch; what a module of the user's can't import is its own error
        if isinstance(error, ImportError) and error.name != "tenure":
            raise
        _tell(arguments.verb, error)
        return _USER_ERROR
    except BrokenPipeError:
        # who reads has seen enough; what is left in the buffer must not fail at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED
    except KeyboardInterrupt:
        print("tenure: interrupted", file=sys.stderr)
        return _INTERRUPTED
    # another program runs outside of what handles our errors: its own are none of ours
    return done if isinstance(done, int) else done()


def _tell(verb: str, error: TenureError | ImportError) -> None:
    """Print an error in one line, as scripts and logs expect of a command.

    It may quote a file. For all verbs, characters that command a terminal are spelled here.
    """
    hint = ""
    if not isinstance(error, CommandError):
        if os.environ.get(_TRACEBACK, "0") not in {"", "0"}:
            print(visible("".join(traceback.format_exception(error))), end="", file=sys.stderr)
        else:
            hint = f" ({type(error).__name__}; {_TRACEBACK}=1 shows where.)"
    print(f"tenure {verb}: error: {in_one_line(str(error))}{hint}", file=sys.stderr)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(_USER_ERROR, f"{self.prog}: error: {message}. See {self.prog} --help.\n")


def _parser() -> tuple[_Parser, dict[str, _Parser]]:
    """Return the parser, and those of the verbs."""
    parser = _Parser(prog="tenure", description="Help PyTorch programs run in limited memory.")
    parser.add_argument("--version", action="version", version=f"tenure {tenure.__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    for verb in _VERBS:
        text = inspect.getdoc(verb) or ""
        added = verbs.add_parser(
            verb.name,
            help=text.partition("\n")[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        verb.add_arguments(added)
        added.set_defaults(run=verb().run)
    return parser, verbs.choices
