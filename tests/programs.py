"""Programs in processes of their own: what a test asks that can't be undone, or of a program's end.

Importing torch takes ten times as long as most of them, so they are forked from one process that
has it. What a new interpreter does by itself, or imports in an order of its own, needs one.
"""

import json
import os
import select
import signal
import subprocess
import sys
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

main = entry_points(group="console_scripts")["tenure"].load()
"""What the command `tenure` calls."""
_SERVER = Path(__file__).with_name("program_server.py")
_TIMEOUT_S = 300
# What a replica imports when it is made, and what runs tests: one set for all that ask for more
# than torch, because each other set is a process that takes six seconds to start.
IMPORTED = ("torch._dynamo", "pytest", "xdist")
_ROOMS = ("tenure.adaptive", "tenure.paging", "tenure.profiler")


class Done(NamedTuple):
    """How a program ended, as `subprocess.CompletedProcess` has it."""

    stdout: str
    stderr: str
    returncode: int


def run_program(
    program: str | Path,
    *arguments: str,
    imported: tuple[str, ...] = (),
    has_tenure: bool = True,
    hides: bool = False,
    **environment: str,
) -> Done:
    """Run code, or the file of a path, or after "-m" a module; in this folder and environment.

    Args:
        program: what is run.
        *arguments: what stands behind it on the command line.
        imported: modules that it is forked with, besides torch. It sees none of all these before it
            imports one, and then sees all.
        has_tenure: whether the rooms of tenure are among them.
        hides: whether searches of the heap leave out what was imported, which takes them longest.
        **environment: more variables.
    """
    words = ["-c", program] if isinstance(program, str) and program != "-m" else [str(program)]
    with TemporaryDirectory() as folder:
        files = Path(os.devnull), Path(folder, "stdout"), Path(folder, "stderr")
        request = {
            "words": [*words, *map(str, arguments)], "files": [*map(str, files)], "hides": hides,
            "folder": os.getcwd(), "environment": {**os.environ, **environment},
        }  # fmt: skip
        server = _server(*(_ROOMS if has_tenure else ()), *imported)
        server.stdin.write(f"{json.dumps(request)}\n".encode())
        pid = int(server.stdout.readline())
        if not select.select([server.stdout], [], [], _TIMEOUT_S)[0]:
            os.kill(pid, signal.SIGKILL)
        returncode = int(server.stdout.readline())
        return Done(*(at.read_text() for at in files[1:]), returncode)


def run_python(*arguments: str, **environment: str) -> Done:
    """Run a new interpreter, for what it does by itself or imports in an order of its own."""
    done = subprocess.run(
        [sys.executable, *arguments], env={**os.environ, **environment},
        capture_output=True, text=True, timeout=_TIMEOUT_S, check=False,
    )  # fmt: skip
    return Done(done.stdout, done.stderr, done.returncode)


@cache
def _server(*imported: str) -> subprocess.Popen[bytes]:
    """Ends with this process, whose end of the pipe it reads."""
    return subprocess.Popen(
        [sys.executable, str(_SERVER), *imported],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # no thread before the fork
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
