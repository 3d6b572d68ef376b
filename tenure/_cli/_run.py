"""The verb that runs a program as Python does, and records it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tenure._errors import CommandError
from tenure._report_files import is_no_file

from ._verb import Verb, byte_size

if TYPE_CHECKING:
    from ._program import Program

SUFFIX = ".tenure"


class Run(Verb):
    """Run a program as python does, and find its leaks and the causes of out-of-memory errors.

    Write the options of tenure before the program. Output, errors and exit code of the program stay
    as they are.

    By default, tenure looks for tensors that grow from step to step, and explains an out-of-memory
    error that ends the program. Both cost little. Ask for more with --timeline, --lines, --on-oom.

    Examples:
      tenure run train.py --epochs 3
      tenure run --timeline -m package.train
      tenure run --lines Model.forward --budget 2GiB train.py
      torchrun --nproc-per-node 2 -m tenure run train.py   (each rank writes its own file)

    The recording is written when the process ends, also after an error, Ctrl-C or SIGTERM, but not
    after os._exit(). Child processes are not recorded.
    """

    name = "run"

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add its arguments."""
        parser.usage = (
            "tenure run [options] SCRIPT [ARGUMENT ...]\n"
            "       tenure run [options] -m MODULE [ARGUMENT ...]\n"
            "       tenure run [options] -c CODE [ARGUMENT ...]"
        )
        add_measuring(parser)
        rest = argparse.REMAINDER
        what = parser.add_mutually_exclusive_group()
        what.add_argument("-m", dest="module", nargs=rest, help="run a module with its arguments")
        what.add_argument("-c", dest="code", nargs=rest, help="run code with its arguments")
        parser.add_argument(
            "program",
            nargs=rest,
            metavar="SCRIPT",
            help="run a script with its arguments; also a folder or zip file with a __main__.py, "
            "or - for stdin",
        )

    def run(self, arguments: argparse.Namespace) -> Callable[[], int]:
        """Check what can be checked, and return what runs the program."""
        # here and below: the help of all verbs is there sooner
        from ._program import RunRecorder

        program = _program(arguments)
        program.check_names()
        path = _path(arguments.output, program)
        is_behind = {"-f", "--force"}.intersection(program.words)
        force = "-f before the program: tenure run -f ..." if is_behind else "-f"
        # a name that nobody chose is made a new one, if there is a file of it
        is_new = arguments.output is None
        check_target(path, replace=arguments.force or is_new, force=force)
        choose_by_default(arguments)
        return RunRecorder(program, arguments, path).run


def add_measuring(parser: argparse.ArgumentParser) -> None:
    """Add what can be measured, and where it goes: for a verb and for a magic alike."""
    parser.add_argument(
        "--budget",
        type=byte_size,
        metavar="SIZE",
        help="raise torch.OutOfMemoryError above this many bytes, such as 2GiB, of the accelerator "
        "or, if there is none, of the CPU",
    )
    parser.add_argument(
        "--leaks", action="store_true", help="look for tensors that grow from step to step"
    )
    parser.add_argument(
        "--lines",
        action="append",
        default=[],
        metavar="FUNC",
        help="measure each line of a function: MODULE:FUNCTION, or the name of a function of the "
        "program; may be repeated",
    )
    parser.add_argument(
        "--timeline", action="store_true", help="record live bytes over time, and their peak"
    )
    parser.add_argument(
        "--on-oom",
        action="store_true",
        help="explain the first out-of-memory error, even if the program handles it",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="write the recording to FILE (default: NAME.tenure, named after the program; "
        "if that exists, NAME.2.tenure and so on)",
    )
    parser.add_argument("-f", "--force", action="store_true", help="overwrite FILE, or NAME.tenure")
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="do not print where the recording is"
    )


def choose_by_default(arguments: argparse.Namespace, *, all_but_lines: bool = False) -> None:
    """Choose what is measured if no option says so: what costs little, or all but lines."""
    arguments.handled_oom = arguments.on_oom
    if not (arguments.leaks or arguments.lines or arguments.timeline or arguments.on_oom):
        arguments.leaks = arguments.on_oom = True
        arguments.timeline = arguments.handled_oom = all_but_lines


def check_target(path: Path, *, replace: bool, force: str = "-f") -> None:
    """Make sure that a file can be written before it takes its time.

    Raises:
        CommandError: it can't go there, or would overwrite what is there.
    """
    shown, folder = shown_path(path), shown_path(path.parent)
    is_there = True
    try:
        path.lstat()
    except FileNotFoundError:
        is_there = False
    except OSError as error:
        raise CommandError(
            f"{shown} can't be written: {error.strerror}. Name another file with -o."
        ) from None
    for is_wrong, told in (
        (path.is_dir(), f"{shown} is a folder. Name a file with -o."),
        (not path.parent.is_dir(), f"There is no folder {folder}. Make it, or name another."),
        (
            not os.access(path.parent, os.W_OK),
            f"{folder} is a folder that can't be written to. Name a file with -o.",
        ),
        (
            is_no_file(path),
            f"{shown} is a device or a pipe, and was left as it is. Name a file with -o.",
        ),
        (
            is_there and not replace,
            f"{shown} is there already, and was left as it is. Overwrite it with {force}, or name "
            "another file with -o.",
        ),
    ):
        if is_wrong:
            raise CommandError(told)


def _program(arguments: argparse.Namespace) -> Program:
    from ._program import code_program, module_program, script_program

    make: Callable[[str, list[str]], Program] = script_program
    given, missing = arguments.program, "There is no program. Name a script, -m or -c"
    if arguments.module is not None:
        given, make, missing = arguments.module, module_program, "-m needs the name of a module"
    elif arguments.code is not None:
        given, make, missing = arguments.code, code_program, "-c needs code"
    # it separates our options from a script whose name begins with a dash
    words = given[1:] if given[:1] == ["--"] else given
    if not words:
        raise CommandError(f"{missing}. See tenure run --help.")
    return make(words[0], words[1:])


def _path(given: str | None, program: Program) -> Path:
    from ._program import rank_of_environment

    path = Path(given if given is not None else f"{program.name}{SUFFIX}")
    rank = rank_of_environment()
    # a folder is refused by its own name
    if rank is not None and not path.is_dir():
        path = path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
    # the program may go to another folder
    return Path.cwd() / path


def shown_path(path: Path) -> str:
    """Return a path as seen from the working directory, if it is below that."""
    inside = os.path.relpath(path)
    return str(path) if inside.startswith(os.pardir) else inside
