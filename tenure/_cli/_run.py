"""The verb that runs a program as Python does, and records it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from tenure._errors import CommandError
from tenure._report_files import is_no_file

from ._verb import Verb, add_options

SUFFIX = ".tenure"
_MEASURING = """
--budget SIZE      raise torch.OutOfMemoryError above this many bytes, such as 2GiB, of the
                   accelerator or, if there is none, of the CPU
--leaks            look for tensors that grow from step to step
--lines FUNC       measure each line of a function: MODULE:FUNCTION, or the name of a function of
                   the program; may be repeated
--timeline         record live bytes over time, and their peak
--on-oom           explain the first out-of-memory error, even if the program handles it
-o, --output FILE  write the recording to FILE (default: NAME.tenure, named after the program; if
                   that exists, NAME.2.tenure and so on)
-f, --force        overwrite FILE, or NAME.tenure
-q, --quiet        do not print where the recording is
"""
"""The options of a measurement and its file, for the verb and the magic."""


class Run(Verb):
    """Run a program as python does, and find its leaks and the causes of out-of-memory errors.

    Write the options of tenure before the program. Output, errors and exit code of the program stay
    as they are.

    By default, tenure looks for tensors that grow from step to step, and explains an out-of-memory
    error that ends the program. Both cost little. If you name --leaks, --timeline, --lines or
    --on-oom, only what you name is measured.

    Examples:
      tenure run train.py --epochs 6
      tenure run --timeline -m package.train
      tenure run --lines Model.forward --budget 2GiB train.py
      torchrun --nproc-per-node 2 -m tenure run train.py   (each rank writes its own file)

    The recording is written when the process ends, also after an error, Ctrl-C or SIGTERM, but not
    after os._exit(). Child processes are not recorded.
    """

    name = "run"
    options = """
program SCRIPT  run a script with its arguments; also a folder or zip file with a __main__.py
"""

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
        add_options(parser, cls.options, {"program": {"nargs": rest}})

    def run(self, arguments: argparse.Namespace) -> Callable[[], int]:
        """Check what can be checked, and return what runs the program."""
        # here and below: the help of all verbs is there sooner
        from ._program import Program, RunRecorder, rank_of_environment

        given, missing = arguments.program, "There is no program. Name a script, -m or -c"
        flag = ""
        if arguments.module is not None:
            given, flag, missing = arguments.module, "-m", "-m needs the name of a module"
        elif arguments.code is not None:
            given, flag, missing = arguments.code, "-c", "-c needs code"
        # it separates our options from a script whose name begins with a dash
        words = given[1:] if given[:1] == ["--"] else given
        if not words:
            raise CommandError(f"{missing}. See tenure run --help.")
        program = Program(flag, words)
        program.check_names()
        # a name that nobody chose is made a new one, if there is a file of it
        is_new = arguments.output is None
        path = Path(f"{program.name}{SUFFIX}" if is_new else arguments.output)
        rank = rank_of_environment()
        # a folder is refused by its own name
        if rank is not None and not path.is_dir():
            path = path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
        # the program may go to another folder
        path = Path.cwd() / path
        is_behind = {"-f", "--force"}.intersection(program.words)
        force = "-f before the program: tenure run -f ..." if is_behind else "-f"
        check_target(path, replace=arguments.force or is_new, force=force)
        choose_by_default(arguments)
        return RunRecorder(program, arguments, path).run


def add_measuring(parser: argparse.ArgumentParser) -> None:
    """Add the options of a measurement and its file, for the verb and the magic."""
    add_options(parser, _MEASURING, {"--lines": {"action": "append", "default": []}})


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


def shown_path(path: Path, folder: str = os.curdir) -> str:
    """Return a path as seen from a folder, if it is below that."""
    inside = os.path.relpath(path, folder)
    return str(path) if inside.startswith(os.pardir) else inside
